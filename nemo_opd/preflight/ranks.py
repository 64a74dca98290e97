"""Device, placement and layouts of a run, resolved from its settings and the machine, and checks of its processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm

import torch

from nemo_opd.cluster.placement import Placement, Places, Processes, num_cores
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.model import Parallelism
from nemo_opd.config.rollout import Rollouts, ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError
from nemo_opd.preflight.memory import SLACK, MemoryInputs, Rank, estimate

_SHARED_MEMORY = "/dev/shm"
_NCCL_BYTES = 10 * 2**20
"""Shared memory per process and NCCL communicator; NCCL's own error names a segment of 9.6 MB."""
_STUDENT = 0
"""Index of the student among the models, before the teachers."""


def resolve_device(cluster: Cluster, key: str = "cluster.device") -> str:
    """Return `cuda` or `cpu`. key: setting of the device. Raises ConfigError for `cuda` without a GPU."""
    if cluster.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if cluster.device == "cuda" and not torch.cuda.is_available() and cluster.address is None:
        raise ConfigError(
            f"{key}=cuda: PyTorch sees no GPU on this machine; write {key}=cpu, or cluster.address of a Ray cluster "
            "with GPUs"
        )
    return cluster.device


def resolve_placement(config: RunConfig, device: str) -> Placement:
    """Return the devices of every group. Raises ConfigError if they are too few or cannot be divided."""
    separate = [teacher for teacher in config.active_teachers if not teacher.is_student]
    placement = _place_processes(config, separate, device)
    return placement.with_inside([teacher.is_student for teacher in config.active_teachers])


def _place_processes(config: RunConfig, teachers: Sequence[Teacher], device: str) -> Placement:
    """Place the student and the teachers that have separate processes."""
    cluster, num_teachers = config.cluster, len(teachers)
    num_ranks, num_nodes = resolve_ranks(cluster, device, reserved_gpus(config.rollout, device)), cluster.num_nodes
    if cluster.placement == "colocated" or not num_teachers:
        return colocated(num_ranks, num_nodes, num_teachers)
    sizes = _separate_sizes(cluster, device, num_ranks, num_teachers)
    models = (config.student, *teachers)
    together = [model.parallelism.tp * model.parallelism.cp for model in models]
    if _fits_every_node(sizes, together, num_nodes):
        student, *per_node = (size // num_nodes for size in sizes)
        return Placement.separate(num_nodes=num_nodes, student_per_node=student, teachers_per_node=per_node)
    if sum(sizes) < num_nodes:
        raise ConfigError(
            f"cluster.num_nodes={num_nodes}: student and teachers have {sum(sizes)} ranks in total, so some nodes "
            f"would have none; write cluster.num_nodes={sum(sizes)}"
        )
    return Placement.consecutive(sizes, together=together, num_nodes=num_nodes)


def colocated(num_ranks: int, num_nodes: int, num_teachers: int = 0) -> Placement:
    """Place one rank of each group on every device. Raises ConfigError if nodes cannot have equally many ranks."""
    if num_ranks % num_nodes:
        raise ConfigError(
            f"cluster.cpu_ranks={num_ranks} is not a multiple of cluster.num_nodes={num_nodes}; write "
            f"cluster.cpu_ranks={-(-num_ranks // num_nodes) * num_nodes}"
        )
    return Placement.colocated(num_nodes=num_nodes, ranks_per_node=num_ranks // num_nodes, num_teachers=num_teachers)


def _separate_sizes(cluster: Cluster, device: str, num_ranks: int, num_teachers: int) -> tuple[int, ...]:
    """Return the number of ranks of the student and each teacher over all nodes.

    Raises ConfigError if there are too few GPUs.
    """
    if device == "cpu":
        return num_ranks, *_teacher_ranks(cluster, num_teachers, num_ranks)
    num_nodes, groups = cluster.num_nodes, 1 + num_teachers
    default = num_ranks // num_nodes // groups * num_nodes or num_ranks // groups  # equally many per node if possible
    teachers = _teacher_ranks(cluster, num_teachers, default)
    _require_gpus_for_all(num_ranks, teachers, num_nodes)
    return num_ranks - sum(teachers), *teachers


def _fits_every_node(sizes: Sequence[int], together: Sequence[int], num_nodes: int) -> bool:
    """Return whether every node can have equally many ranks of each group, with no tp · cp group across nodes.

    Student ranks then read output of teacher ranks on the same node.
    """
    return num_nodes == 1 or all(
        size % num_nodes == 0 and size // num_nodes % ranks == 0 for size, ranks in zip(sizes, together, strict=True)
    )


def reserved_gpus(rollout: Rollouts | None, device: str) -> int:
    """Return the number of GPUs reserved for a rollout server. Raises ConfigError for `rollout.sleep` on CPUs."""
    if not isinstance(rollout, ServerRollout):
        return 0
    if rollout.sleep is True and device == "cpu":
        raise ConfigError(
            "rollout.sleep=true: the run is on CPUs, where vLLM cannot free memory; leave it out, or write "
            "rollout.sleep=false"
        )
    return rollout.gpus or 0


def resolve_ranks(cluster: Cluster, device: str, reserved: int = 0) -> int:
    """Return the number of GPUs on all nodes or, on CPU, of the student's processes.

    reserved: GPUs of this machine kept for a rollout server. Raises ConfigError if the settings ask for more than the
    machine has.
    """
    if reserved and (device == "cpu" or cluster.address is not None):
        reason = "the run is on CPUs" if device == "cpu" else "Ray assigns the GPUs of cluster.address"
        raise ConfigError(
            f"rollout.gpus={reserved}: {reason}; leave it out, or set rollout.environment.CUDA_VISIBLE_DEVICES to "
            "unused GPUs"
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
            f"rollout.gpus={reserved}: this machine has {torch.cuda.device_count()} GPUs, which leaves none for "
            "training; leave it out to let the server share the training GPUs"
        )
    if cluster.launcher == "local" and cluster.gpus_per_node is None:
        size = Processes.started().size
        if reserved and size > visible:
            raise ConfigError(
                f"rollout.gpus={reserved}: this leaves {visible} GPUs for {size} processes of torchrun; start "
                f"{visible}, or lower rollout.gpus"
            )
        return size
    if cluster.gpus_per_node is None and not visible:
        raise ConfigError(
            "cluster.gpus_per_node: this machine has no GPU to count; set it to the number of GPUs on each node of the "
            "Ray cluster"
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
    """Return the number of ranks of each active teacher. Raises ConfigError if the list has another length."""
    ranks = default if cluster.teacher_ranks is None else cluster.teacher_ranks
    if isinstance(ranks, int):
        return (ranks,) * num_teachers
    if len(ranks) != num_teachers:
        raise ConfigError(
            f"cluster.teacher_ranks={list(ranks)}: {len(ranks)} numbers for {num_teachers} teachers; write one for "
            "each, or a single one for all"
        )
    return ranks


def _require_gpus_for_all(num_gpus: int, teachers: tuple[int, ...], num_nodes: int) -> None:
    """Raise ConfigError unless the student and every teacher get a GPU."""
    nodes = "the node" if num_nodes == 1 else f"the cluster of {num_nodes} nodes"
    if num_gpus <= len(teachers):
        raise ConfigError(
            f"cluster.placement=separate: the student and {len(teachers)} teachers need a GPU each, and {nodes} has "
            f"{num_gpus}; write cluster.placement=colocated"
        )
    if sum(teachers) >= num_gpus:
        raise ConfigError(
            f"cluster.teacher_ranks: the teachers take {' + '.join(map(str, teachers))} of the {num_gpus} GPUs of "
            f"{nodes}, which leaves none for the student; lower it to {num_gpus // (1 + len(teachers))} for each "
            "teacher"
        )


def resolve_layouts(config: RunConfig, placement: Placement) -> tuple[Layout, tuple[Layout, ...]]:
    """Return the layouts of the student and every active teacher. Raises ConfigError as `resolve_layout` does."""
    keys = ["student", *(f"teachers.{i}" for i in range(len(config.active_teachers)))]
    models = (config.student, *config.active_teachers)
    student, *teachers = (
        resolve_layout(f"{key}.parallelism", len(places), model.parallelism)
        for key, model, places in zip(keys, models, placement.groups, strict=True)
    )
    return student, tuple(teachers)


def resolve_layout(key: str, num_ranks: int, parallelism: Parallelism) -> Layout:
    """Return the layout of a model. key: setting of its parallelism.

    Raises ConfigError if tp · cp does not divide its ranks, or replicas does not divide the data-parallel ranks.
    """
    tp, cp, replicas = parallelism.tp, parallelism.cp, parallelism.replicas
    if num_ranks % (tp * cp) == 0:
        dp = num_ranks // (tp * cp)
        if replicas != "auto" and dp % replicas:
            raise ConfigError(
                f"{key}.replicas={replicas} does not divide the {dp} data-parallel ranks (of {num_ranks} ranks); write "
                f"{key}.replicas={_largest_divisor(dp, replicas)}, or change the number of ranks"
            )
        return Layout.of(num_ranks, parallelism)
    smaller_tp = _largest_divisor(num_ranks, tp)
    smaller_cp = _largest_divisor(num_ranks // smaller_tp, cp)
    raise ConfigError(
        f"{key}: tp={tp} × cp={cp} = {tp * cp} does not divide the model's {num_ranks} ranks; write "
        f"{key}.tp={smaller_tp}, {key}.cp={smaller_cp}, or change the number of ranks"
    )


def _largest_divisor(number: int, at_most: int) -> int:
    return max(divisor for divisor in range(1, min(at_most, number) + 1) if number % divisor == 0)


def require_batch_divides(config: RunConfig, num_ranks: int, teacher_ranks: Sequence[int] = ()) -> None:
    """Check that the student's and each teacher's data-parallel ranks can divide a batch equally.

    num_ranks, teacher_ranks: numbers of data-parallel ranks. Raises ConfigError with a size that passes.
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
        f"train.global_batch_size={size} is not a multiple of {reason}; "
        f"write train.global_batch_size={nearest_size}, or change the number of ranks"
    )


def resolve_replicas(config: RunConfig, inputs: MemoryInputs, placement: Placement) -> tuple[RunConfig, MemoryInputs]:
    """Resolve every `replicas: auto` in settings and layouts.

    A model gets a replica on every node if its weights, gradients and optimizer state then take at most half of a
    GPU. If the run does not fit easily so without more offloading, on CPU and if GPU memory is unknown, none does.
    """
    models, setups = (config.student, *config.active_teachers), [inputs.student, *inputs.teachers]
    device_bytes, replicas = inputs.machine.device_bytes, dict[int, int]()
    for i, (model, setup, places) in enumerate(zip(models, setups, placement.groups, strict=True)):
        num_nodes, layout = _equal_nodes(places), setup.layout
        if i - 1 in placement.inside:
            setups[i] = replace(setup, layout=setups[_STUDENT].layout)
        elif device_bytes and model.parallelism.replicas == "auto" and num_nodes > 1 and layout.dp % num_nodes == 0:
            replicated = replace(setup, layout=replace(layout, replicas=num_nodes))
            rank = Rank(model, replicated, inputs.machine.device)
            if rank.weights + (rank.trained if i == _STUDENT else 0) + rank.optimizer <= device_bytes / 2:
                setups[i], replicas[i] = replicated, num_nodes
    replicated_inputs = replace(inputs, student=setups[_STUDENT], teachers=tuple(setups[1:]))
    if replicas and estimate(config, replicated_inputs).fits(SLACK):
        return _with_replicas(config, replicas), replicated_inputs
    return _with_replicas(config, {}), inputs


def _equal_nodes(places: Places) -> int:
    """Return the number of nodes of a group; 1 if its ranks are spread unevenly."""
    counts = Counter(place.node for place in places)
    return len(counts) if len(set(counts.values())) == 1 else 1


def _with_replicas(config: RunConfig, replicas: Mapping[int, int]) -> RunConfig:
    """Replace `auto` in the settings by these numbers of replicas, or 1."""
    student, *teachers = (
        model.with_parallelism(replicas=replicas.get(i, 1)) if model.parallelism.replicas == "auto" else model
        for i, model in enumerate((config.student, *config.teachers))
    )
    return config.model_copy(update={"student": student, "teachers": tuple(teachers)})


def require_processes(cluster: Cluster, placement: Placement, device: str) -> None:
    """Raise ConfigError if a run without Ray has different numbers of processes and ranks."""
    num_ranks, num_processes = len(placement.student), Processes.started().size
    if cluster.launcher == "local" and num_ranks != num_processes:
        key = "cpu_ranks" if device == "cpu" else "gpus_per_node"
        raise ConfigError(
            f"cluster.{key}={num_ranks}: with cluster.launcher=local the ranks are torchrun's processes, and it has "
            f"{num_processes}; start the command with `torchrun --nproc-per-node={num_ranks}`, or set "
            f"cluster.{key}={num_processes}"
        )


def require_shared_gpus(config: RunConfig, device: str, placement: Placement) -> None:
    """Raise ConfigError if several processes would share a GPU of this machine in an exclusive compute mode."""
    cluster, rollout = config.cluster, config.rollout
    number = 1 if cluster.launcher == "local" else placement.groups_per_device
    number += isinstance(rollout, ServerRollout) and rollout.shares_devices
    if device == "cpu" or cluster.address is not None or number == 1:
        return
    for line in _compute_modes():
        index, _, mode = line.partition(", ")
        if mode.startswith("Exclusive"):
            raise ConfigError(
                f"cluster.placement={cluster.placement}: GPU {index} is in the compute mode {mode}, which allows only "
                f"one process, but the run has {number} per GPU; change the mode with `nvidia-smi -i {index} -c "
                "DEFAULT` (needs root), or set cluster.placement=separate or cluster.launcher=local, and rollout.gpus "
                "for a rollout server"
            )


def warn_of_shared_memory(device: str, groups: Sequence[Layout], nodes: int) -> list[str]:
    """Return a warning if /dev/shm may be too small for NCCL, as in Docker with its default of 64 MB.

    groups: layouts of the student and the teachers. The handoff and Ray do not need it.
    """
    if device == "cpu":
        return []
    need = _NCCL_BYTES * sum(_communicators(layout) * -(-layout.size // nodes) for layout in groups)
    free = shutil.disk_usage(_SHARED_MEMORY).free if os.path.isdir(_SHARED_MEMORY) else 0
    if need <= free:
        return []
    return [
        f"{_SHARED_MEMORY} has {free / 2**20:.0f} MiB free, and NCCL may need {need / 2**20:.0f} MiB there for this "
        "node's processes; if it fails with `unhandled system error`, start Docker with --shm-size=1g or --ipc=host, "
        "or enlarge it (`mount -o remount,size=1G /dev/shm`)"
    ]


def _communicators(layout: Layout) -> int:
    """Count a rank's NCCL communicators: the one of all ranks, and one per mesh axis."""
    replicas = (layout.replicas, layout.dp // layout.replicas) if layout.replicas > 1 else ()
    axes = (layout.dp, layout.cp, layout.tp, layout.dp * layout.cp) if layout.cp * layout.tp > 1 else ()
    return (layout.size > 1) + sum(size > 1 for size in (*replicas, *axes))


def _compute_modes() -> list[str]:
    """Return lines such as `0, Default`, one per GPU, or an empty list if nvidia-smi fails."""
    command = ["nvidia-smi", "--query-gpu=index,compute_mode", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
