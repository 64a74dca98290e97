"""Device, placement and layouts of a run, from its settings and the machine."""

from collections.abc import Sequence
from math import lcm

import torch

from nemo_opd.cluster.placement import Placement, Processes, num_cores
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.parallelism import Parallelism
from nemo_opd.config.rollout import Rollouts, ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError


def resolve_device(cluster: Cluster, key: str = "cluster.device") -> str:
    """Return `cuda` or `cpu`; key: of the device. Raises ConfigError for `cuda` where there is none."""
    if cluster.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if cluster.device == "cuda" and not torch.cuda.is_available() and cluster.address is None:
        raise ConfigError(
            f"{key}=cuda: PyTorch sees no GPU on this machine; write {key}=cpu, or cluster.address of a Ray cluster "
            "with GPUs"
        )
    return cluster.device


def resolve_placement(config: RunConfig, device: str) -> Placement:
    """Return the devices of every group. Raises ConfigError where they do not suffice or cannot be divided."""
    separate = [teacher for teacher in config.active_teachers if not teacher.is_student]
    placement = _placement_of(config, separate, device)
    return placement.with_inside([teacher.is_student for teacher in config.active_teachers])


def _placement_of(config: RunConfig, teachers: Sequence[Teacher], device: str) -> Placement:
    """Return the devices of the student and of teachers with separate processes."""
    cluster, num_teachers = config.cluster, len(teachers)
    num_ranks, num_nodes = resolve_ranks(cluster, device, reserved_gpus(config.rollout, device)), cluster.num_nodes
    if cluster.placement == "colocated" or not num_teachers:
        return colocated(num_ranks, num_nodes, num_teachers)
    sizes = _separate_sizes(cluster, device, num_ranks, num_teachers)
    models = (config.student, *teachers)
    together = [model.parallelism.tp * model.parallelism.cp for model in models]
    if _fits_every_node(sizes, together, num_nodes):
        student, *others = (size // num_nodes for size in sizes)
        return Placement.separate(num_nodes=num_nodes, student_per_node=student, teachers_per_node=others)
    if sum(sizes) < num_nodes:
        raise ConfigError(
            f"cluster.num_nodes={num_nodes}: student and teachers have {sum(sizes)} ranks in all, which leaves nodes "
            f"without any; write cluster.num_nodes={sum(sizes)}"
        )
    return Placement.consecutive(sizes, together=together, num_nodes=num_nodes)


def colocated(num_ranks: int, num_nodes: int, num_teachers: int = 0) -> Placement:
    """Return a rank of each group on every device. Raises ConfigError for ranks that nodes cannot share equally."""
    if num_ranks % num_nodes:
        raise ConfigError(
            f"cluster.cpu_ranks={num_ranks}: {num_nodes} nodes (cluster.num_nodes) cannot have equally many; write "
            f"cluster.cpu_ranks={-(-num_ranks // num_nodes) * num_nodes}"
        )
    return Placement.colocated(num_nodes=num_nodes, ranks_per_node=num_ranks // num_nodes, num_teachers=num_teachers)


def _separate_sizes(cluster: Cluster, device: str, num_ranks: int, num_teachers: int) -> tuple[int, ...]:
    """Return the ranks of the student and of each teacher over all nodes. Raises ConfigError for too few GPUs."""
    if device == "cpu":
        return num_ranks, *_teacher_ranks(cluster, num_teachers, num_ranks)
    num_nodes, groups = cluster.num_nodes, 1 + num_teachers
    of_every_node = num_ranks // num_nodes // groups * num_nodes
    teachers = _teacher_ranks(cluster, num_teachers, of_every_node or num_ranks // groups)
    _require_gpus_for_all(num_ranks, teachers, num_nodes)
    return num_ranks - sum(teachers), *teachers


def _fits_every_node(sizes: Sequence[int], together: Sequence[int], num_nodes: int) -> bool:
    """Return whether every node can have equally many ranks of each group, with each tp · cp group on one node.

    A rank of the student then reads what a teacher computed on the same node.
    """
    return num_nodes == 1 or all(
        size % num_nodes == 0 and size // num_nodes % ranks == 0 for size, ranks in zip(sizes, together, strict=True)
    )


def reserved_gpus(rollout: Rollouts | None, device: str) -> int:
    """Return the number of GPUs that a rollout server has for itself. Raises ConfigError for sleep on CPUs."""
    if not isinstance(rollout, ServerRollout):
        return 0
    if rollout.sleep is True and device == "cpu":
        raise ConfigError(
            "rollout.sleep=true: the run is on CPUs, where vLLM cannot give memory back; leave it out, or write "
            "rollout.sleep=false"
        )
    return rollout.gpus or 0


def resolve_ranks(cluster: Cluster, device: str, reserved: int = 0) -> int:
    """Return the GPUs of all nodes, or on CPU the student's processes.

    reserved: GPUs of this machine that a rollout server has. Raises ConfigError for more than there are.
    """
    if reserved and (device == "cpu" or cluster.address is not None):
        where = "the run is on CPUs" if device == "cpu" else "Ray gives out the GPUs of cluster.address"
        raise ConfigError(
            f"rollout.gpus={reserved}: {where}; leave it out, or name GPUs that nobody else has in "
            "rollout.environment.CUDA_VISIBLE_DEVICES"
        )
    if cluster.num_nodes > 1 and cluster.address is None:
        raise ConfigError(
            f"cluster.num_nodes={cluster.num_nodes}: several nodes need a running Ray cluster; start it with "
            "`ray start` on each node and write cluster.address=auto"
        )
    if device == "cpu":
        if cluster.address is None and cluster.cpu_ranks > num_cores():
            raise ConfigError(
                f"cluster.cpu_ranks={cluster.cpu_ranks}: this machine has {num_cores()} cores; write "
                f"cluster.cpu_ranks={num_cores()} or fewer"
            )
        return cluster.cpu_ranks
    visible = max(0, torch.cuda.device_count() - reserved)
    if reserved and not visible:
        raise ConfigError(
            f"rollout.gpus={reserved}: this machine has {torch.cuda.device_count()} GPUs, which leaves none for the "
            "training; leave it out, and the server shares the training's"
        )
    if cluster.launcher == "local" and cluster.gpus_per_node is None:
        size = Processes.started().size
        if reserved and size > visible:
            raise ConfigError(
                f"rollout.gpus={reserved}: {visible} GPUs are left for {size} processes of torchrun; start "
                f"{visible}, or lower rollout.gpus"
            )
        return size
    if cluster.gpus_per_node is None and not visible:
        raise ConfigError(
            "cluster.gpus_per_node: this machine has no GPU to count; say how many each node of the Ray cluster has"
        )
    gpus = cluster.gpus_per_node or visible
    if cluster.address is None and gpus > visible:
        raise ConfigError(
            f"cluster.gpus_per_node={gpus}: this machine has {visible}"
            f"{f' in addition to those of rollout.gpus={reserved}' if reserved else ''}; write "
            f"cluster.gpus_per_node={visible} or fewer"
        )
    return cluster.num_nodes * gpus


def _teacher_ranks(cluster: Cluster, num_teachers: int, default: int) -> tuple[int, ...]:
    """Return the ranks of each active teacher over all nodes. Raises ConfigError for a list of another length."""
    given = default if cluster.teacher_ranks is None else cluster.teacher_ranks
    if isinstance(given, int):
        return (given,) * num_teachers
    if len(given) != num_teachers:
        raise ConfigError(
            f"cluster.teacher_ranks={list(given)}: {len(given)} numbers for {num_teachers} teachers; write one for "
            "each, or a single one for all"
        )
    return given


def _require_gpus_for_all(num_gpus: int, teachers: tuple[int, ...], num_nodes: int) -> None:
    where = "the node" if num_nodes == 1 else f"the cluster of {num_nodes} nodes"
    if num_gpus <= len(teachers):
        raise ConfigError(
            f"cluster.placement=separate: a GPU is needed for the student and for each of {len(teachers)} "
            f"teachers, and {where} has {num_gpus}; write cluster.placement=colocated"
        )
    if sum(teachers) >= num_gpus:
        raise ConfigError(
            f"cluster.teacher_ranks: the teachers take {' + '.join(map(str, teachers))} of the {num_gpus} GPUs of "
            f"{where}, which leaves none for the student; lower it to {num_gpus // (1 + len(teachers))} for each "
            "teacher"
        )


def resolve_layouts(config: RunConfig, placement: Placement) -> tuple[Layout, tuple[Layout, ...]]:
    """Return the layouts of the student and of every active teacher. Raises ConfigError as `resolve_layout` does."""
    models = {"student": config.student, **{f"teachers.{i}": each for i, each in enumerate(config.active_teachers)}}
    student, *teachers = (
        resolve_layout(f"{key}.parallelism", len(places), model.parallelism)
        for (key, model), places in zip(models.items(), placement.groups, strict=True)
    )
    return student, tuple(teachers)


def resolve_layout(key: str, num_ranks: int, parallelism: Parallelism) -> Layout:
    """Return the layout of a model; key: of its parallelism.

    Raises ConfigError where tp · cp does not divide its ranks, or replicas what is left.
    """
    tp, cp, replicas = parallelism.tp, parallelism.cp, parallelism.replicas
    if num_ranks % (tp * cp) == 0:
        dp = num_ranks // (tp * cp)
        if replicas != "auto" and dp % replicas:
            raise ConfigError(
                f"{key}.replicas={replicas}: {dp} of its {num_ranks} ranks are data parallel, and "
                f"{replicas} does not divide them into equal copies; write "
                f"{key}.replicas={_largest_divisor(dp, replicas)}, or change the number of ranks"
            )
        return Layout.of(num_ranks, parallelism)
    smaller_tp = _largest_divisor(num_ranks, tp)
    smaller_cp = _largest_divisor(num_ranks // smaller_tp, cp)
    raise ConfigError(
        f"{key}: tp={tp} × cp={cp} = {tp * cp} ranks form a group, which does not divide the {num_ranks} "
        f"that it has; write {key}.tp={smaller_tp}, {key}.cp={smaller_cp}, or change "
        "the number of ranks"
    )


def _largest_divisor(number: int, at_most: int) -> int:
    return max(divisor for divisor in range(1, min(at_most, number) + 1) if number % divisor == 0)


def require_batch_divides(config: RunConfig, num_ranks: int, teacher_ranks: Sequence[int] = ()) -> None:
    """Check that a batch divides into the student's ranks, and into each teacher's.

    All counts are of data-parallel ranks. Raises ConfigError with a size that passes.
    """
    size = config.train.global_batch_size
    unit = lcm(num_ranks, *teacher_ranks)
    if size % unit == 0:
        return
    nearest_size = max(unit, size // unit * unit)
    if size % num_ranks:
        reason = f"the student's data-parallel ranks, {num_ranks}"
    else:
        reason = f"the teachers' data-parallel ranks, {' and '.join(map(str, teacher_ranks))}"
    raise ConfigError(
        f"train.global_batch_size={size} is no multiple of {reason}; "
        f"write train.global_batch_size={nearest_size}, or change the number of ranks"
    )
