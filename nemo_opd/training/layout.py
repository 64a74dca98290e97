"""Where a run happens: device, ranks, batch grid, directory."""

import os
import tempfile
from collections.abc import Sequence
from datetime import datetime
from math import lcm
from pathlib import Path

import torch

from nemo_opd.checkpoint.identity import newest_of_same_run
from nemo_opd.checkpoint.manager import CheckpointManager, Progress
from nemo_opd.cluster.placement import Placement
from nemo_opd.cluster.virtual_cluster import num_cores
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.run import Run, RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError


def resolve_device(cluster: Cluster) -> str:
    if cluster.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if cluster.device == "cuda" and not torch.cuda.is_available() and cluster.address is None:
        raise ConfigError(
            "cluster.device=cuda: PyTorch sees no GPU on this machine; write cluster.device=cpu, or cluster.address of "
            "a Ray cluster with GPUs"
        )
    return cluster.device


def resolve_placement(config: RunConfig, device: str) -> Placement:
    """The devices of every group. Raises ConfigError where they do not suffice or cannot be shared out."""
    cluster, num_teachers = config.cluster, len(config.active_teachers)
    num_nodes, ranks_per_node = cluster.num_nodes, resolve_ranks(cluster, device) // cluster.num_nodes
    if cluster.placement == "colocated" or not num_teachers:
        return Placement.colocated(num_nodes=num_nodes, ranks_per_node=ranks_per_node, num_teachers=num_teachers)
    if device == "cpu":
        given = teacher_ranks(cluster, num_teachers, cluster.cpu_ranks)
        per_node = share_of_a_node(given, num_nodes)
        return Placement.separate(num_nodes=num_nodes, student_per_node=ranks_per_node, teachers_per_node=per_node)
    equal = ranks_per_node // (1 + num_teachers)
    per_node = share_of_a_node(teacher_ranks(cluster, num_teachers, equal * num_nodes), num_nodes)
    require_gpus_for_all(ranks_per_node, per_node)
    return Placement.separate(
        num_nodes=num_nodes, student_per_node=ranks_per_node - sum(per_node), teachers_per_node=per_node
    )


def resolve_ranks(cluster: Cluster, device: str) -> int:
    """GPUs of all nodes, or on CPU the student's processes. Raises ConfigError where this machine has too few."""
    if cluster.num_nodes > 1 and cluster.address is None:
        raise ConfigError(
            f"cluster.num_nodes={cluster.num_nodes}: several nodes need a running Ray cluster; start it with "
            "`ray start` on each node and write cluster.address=auto"
        )
    if device == "cpu":
        return resolve_cpu_ranks(cluster)
    visible = torch.cuda.device_count()
    if cluster.gpus_per_node is None and not visible:
        raise ConfigError(
            "cluster.gpus_per_node: this machine has no GPU to count; say how many each node of the Ray cluster has"
        )
    gpus = cluster.gpus_per_node or visible
    if cluster.address is None and gpus > visible:
        raise ConfigError(
            f"cluster.gpus_per_node={gpus}: this machine has {visible}; write cluster.gpus_per_node={visible} or fewer"
        )
    return cluster.num_nodes * gpus


def resolve_cpu_ranks(cluster: Cluster) -> int:
    if cluster.address is None and cluster.cpu_ranks > num_cores():
        raise ConfigError(
            f"cluster.cpu_ranks={cluster.cpu_ranks}: this machine has {num_cores()} cores; write "
            f"cluster.cpu_ranks={num_cores()} or fewer"
        )
    if cluster.cpu_ranks % cluster.num_nodes:
        raise ConfigError(
            f"cluster.cpu_ranks={cluster.cpu_ranks}: {cluster.num_nodes} nodes (cluster.num_nodes) cannot have equally "
            f"many; write cluster.cpu_ranks={next_multiple(cluster.cpu_ranks, cluster.num_nodes)}"
        )
    return cluster.cpu_ranks


def teacher_ranks(cluster: Cluster, num_teachers: int, default: int) -> tuple[int, ...]:
    """Of each active teacher on all nodes together. Raises ConfigError for a list of another length."""
    given = default if cluster.teacher_ranks is None else cluster.teacher_ranks
    if isinstance(given, int):
        return (given,) * num_teachers
    if len(given) != num_teachers:
        raise ConfigError(
            f"cluster.teacher_ranks={list(given)}: {len(given)} numbers for {num_teachers} teachers; write one for "
            "each, or a single one for all"
        )
    return given


def share_of_a_node(ranks: tuple[int, ...], num_nodes: int) -> tuple[int, ...]:
    """Raises ConfigError where nodes would differ: then a rank of the student could not read on its own node."""
    for count in ranks:
        if count % num_nodes:
            raise ConfigError(
                f"cluster.teacher_ranks={count}: {num_nodes} nodes (cluster.num_nodes) cannot have equally many, and a "
                f"student's rank reads what a teacher computed on its own node; write cluster.teacher_ranks="
                f"{next_multiple(count, num_nodes)}"
            )
    return tuple(count // num_nodes for count in ranks)


def require_gpus_for_all(gpus_per_node: int, teachers_per_node: tuple[int, ...]) -> None:
    if gpus_per_node <= len(teachers_per_node):
        raise ConfigError(
            f"cluster.placement=separate: each node needs a GPU for the student and for each of "
            f"{len(teachers_per_node)} teachers, and has {gpus_per_node}; write cluster.placement=colocated"
        )
    if sum(teachers_per_node) >= gpus_per_node:
        raise ConfigError(
            f"cluster.teacher_ranks: the teachers take {' + '.join(map(str, teachers_per_node))} of the "
            f"{gpus_per_node} GPUs of a node, which leaves none for the student; lower it to "
            f"{gpus_per_node // (1 + len(teachers_per_node))} for each teacher and node"
        )


def resolve_layout(key: str, num_ranks: int, num_nodes: int = 1, *, tp: int, cp: int) -> Layout:
    """How the ranks of one model are arranged; data parallel is what is left beside tp · cp.

    key: of the model. num_nodes: 1 where it does not matter that ranks which belong together are on one node. Raises
    ConfigError, with a value that works, where tp · cp does not divide the ranks (of a node).
    """
    ranks_per_node = num_ranks // num_nodes
    if ranks_per_node % (tp * cp) == 0:
        return Layout.of(num_ranks, cp, tp)
    of_a_node = f" on each of {num_nodes} nodes, and what they read must be on their own" if num_nodes > 1 else ""
    works = ", ".join(f"{key}.parallelism.{name}={value}" for name, value in nearest(ranks_per_node, tp, cp).items())
    raise ConfigError(
        f"{key}.parallelism: tp={tp} × cp={cp} = {tp * cp} ranks belong together, which does not divide the "
        f"{ranks_per_node} that it has{of_a_node}; write {works}, or change the number of ranks"
    )


def nearest(num_ranks: int, tp: int, cp: int) -> dict[str, int]:
    """Largest degrees up to those wished for whose product divides the ranks; cp gives way to tp."""
    smaller_tp = max(degree for degree in range(1, tp + 1) if num_ranks % degree == 0)
    rest = num_ranks // smaller_tp
    smaller_cp = max(degree for degree in range(1, cp + 1) if rest % degree == 0)
    return {"tp": smaller_tp, "cp": smaller_cp}


def next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def require_batch_divides(config: RunConfig, num_ranks: int, teacher_ranks: Sequence[int] = ()) -> None:
    """Rows of a batch must be cut evenly: the student's into microbatches of its ranks, and each teacher's into ranks.

    All counts are of data-parallel ranks. Raises ConfigError, with a size that passes.
    """
    size, micro = config.train.global_batch_size, config.train.micro_batch_size
    unit = lcm(num_ranks * micro, *teacher_ranks)
    if size % unit == 0:
        return
    nearest_size = max(unit, size // unit * unit)
    if size % (num_ranks * micro):
        reason = f"ranks × train.micro_batch_size = {num_ranks} × {micro}"
    else:
        reason = f"the teachers' data-parallel ranks, {' and '.join(map(str, teacher_ranks))}"
    raise ConfigError(
        f"train.global_batch_size={size} is no multiple of {reason}; "
        f"write train.global_batch_size={nearest_size}, or change the microbatch or the number of ranks"
    )


def resolve_output_dir(run: Run) -> Path:
    """The run's directory, not yet created. Raises ConfigError where it cannot be written."""
    folder = run.output_dir or default_output_dir(run.name)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ConfigError(
            f"run.output_dir={folder}: {existing} is not writable ({reason}); name another directory, or change its "
            "permissions"
        ) from error
    return folder


def progress_to_resume(config: RunConfig, output_dir: Path) -> Progress | None:
    """Where the run continues; None where it starts anew.

    Raises ConfigError where the directory holds a run that is not to be continued, and CheckpointError where it is to
    be continued and cannot be.
    """
    checkpoints = CheckpointManager(output_dir / "checkpoints", config.train.keep_last)
    if config.run.resume == "auto":
        return newest_of_same_run(checkpoints, config)
    if steps := checkpoints.steps():
        raise ConfigError(
            f"run.output_dir={output_dir} holds a run with a checkpoint at step {steps[-1]}; write run.resume=auto to "
            "continue it, or another run.output_dir"
        )
    return None


def default_output_dir(name: str) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path("outputs") / name / stamp
    for number in range(1, 1000):
        if not folder.exists():
            break
        folder = folder.with_name(f"{stamp}_{number}")
    return folder
