"""Startup of a run's processes with Ray or torchrun, and checks before it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nemo_opd.cluster.base import Cluster
from nemo_opd.cluster.local import LocalCluster, release, serve
from nemo_opd.cluster.placement import Placement, Processes
from nemo_opd.config.cluster import Cluster as Settings
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError

_SHARED_MEMORY = "/dev/shm"
_NCCL_BYTES = 10 * 2**20
"""Shared memory per process and NCCL communicator; NCCL's own error names a segment of 9.6 MB."""


@contextmanager
def driving(cluster: Settings) -> Iterator[bool]:
    """Yield whether this process drives the run; other torchrun ranks do all their work first and then yield False.

    Raises ConfigError if torchrun started several processes for a run with Ray.
    """
    processes = Processes.started()
    if cluster.launcher == "ray" and processes.size > 1:
        raise ConfigError(
            f"cluster.launcher=ray: torchrun has started {processes.size} processes, and each would start a run; set "
            "cluster.launcher=local, or start one process without torchrun"
        )
    if processes.rank > 0:
        serve(cluster.timeout_s)
        yield False
        return
    try:
        yield True
    finally:
        release()


def open_cluster(settings: Settings, device: str, placement: Placement) -> Cluster:
    """Open the cluster of a run. Raises ClusterError if its resources are not free."""
    if settings.launcher == "local":
        return LocalCluster(settings, device=device, placement=placement)
    from nemo_opd.cluster.ray.cluster import RayCluster  # Ray takes seconds to import

    return RayCluster(settings, device=device, placement=placement)


def require_processes(cluster: Settings, placement: Placement, device: str) -> None:
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
