"""Start of a run's processes, by Ray or by torchrun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nemo_opd.cluster.base import Cluster
from nemo_opd.cluster.local import LocalCluster, release, serve
from nemo_opd.cluster.placement import Placement, Processes
from nemo_opd.config.cluster import Cluster as Settings
from nemo_opd.errors import ConfigError
from nemo_opd.training.plan import Plan


@contextmanager
def driving(cluster: Settings) -> Iterator[bool]:
    """Yield whether this process drives the run; other ranks of torchrun do all their work here and yield False.

    Raises ConfigError for processes of torchrun in a run that Ray is to start.
    """
    processes = Processes.started()
    if cluster.launcher == "ray" and processes.size > 1:
        raise ConfigError(
            f"cluster.launcher=ray: torchrun has started {processes.size} processes, each of which would start a run; "
            "write cluster.launcher=local, or start one process without torchrun"
        )
    if processes.rank > 0:
        serve(cluster.timeout_s)
        yield False
        return
    try:
        yield True
    finally:
        release()


def require_processes(cluster: Settings, placement: Placement) -> None:
    """Raise ConfigError where the numbers of processes and ranks of a run without Ray differ."""
    num_ranks, num_processes = len(placement.student), Processes.started().size
    if cluster.launcher == "local" and num_ranks != num_processes:
        key = "cpu_ranks" if cluster.gpus_per_node is None else "gpus_per_node"
        raise ConfigError(
            f"cluster.{key}={num_ranks}: with cluster.launcher=local the ranks are the processes of torchrun, of which "
            f"there are {num_processes}; start the command with `torchrun --nproc-per-node={num_ranks}`, or write "
            f"cluster.{key}={num_processes}"
        )


def open_cluster(plan: Plan) -> Cluster:
    """Open the cluster of a plan. Raises ClusterError where its resources are not free."""
    settings = plan.config.cluster
    if settings.launcher == "local":
        return LocalCluster(settings, device=plan.device, placement=plan.placement)
    from nemo_opd.cluster.ray.cluster import RayCluster  # Ray takes seconds to import

    return RayCluster(settings, device=plan.device, placement=plan.placement)
