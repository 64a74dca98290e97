"""The resources of a run: a placement group with one bundle per rank, on a Ray cluster that is started if need be."""

import logging
import os
import socket
from typing import Any, Self

import psutil

from nemo_opd.cluster.session_folder import SessionFolder
from nemo_opd.config.cluster import Cluster
from nemo_opd.errors import ClusterError

# Read by Ray when it is imported. Its uv hook would build the environment anew for every worker.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.util.placement_group import placement_group, remove_placement_group

OBJECT_STORE_BYTES = 200 * 2**20
"""Of a local cluster: ids, masks and handles of a few batches."""


def num_cores() -> int:
    """Cores this process may run on."""
    return len(psutil.Process().cpu_affinity() or ()) or os.cpu_count() or 1


def probe(address: str) -> None:
    """Raises OSError at once where nothing listens at `host:port`; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


class VirtualCluster:
    """`num_ranks` bundles, each with room for one actor of every worker group.

    Actors with the same rank share a bundle and so a GPU; on GPU each takes an equal share of it.
    """

    def __init__(self, settings: Cluster, *, device: str, num_ranks: int, num_groups: int) -> None:
        """Raises ClusterError where the resources are not there within `cluster.timeout_s`."""
        self.device = device
        self.num_ranks = num_ranks
        self.timeout_s = settings.timeout_s
        self.gpu_share = int(10_000 / num_groups) / 10_000 if device == "cuda" else 0.0
        # Threads that wait for each other on busy cores cost more than they bring.
        self.threads = max(1, num_cores() // (num_ranks * num_groups)) if device == "cpu" else 1
        self._is_ours = False
        """Whether this process's Ray session is to be ended by `close`."""
        self._folder: SessionFolder | None = None
        self._placement: Any = None
        try:
            self._start(settings, num_ranks * num_groups)
            self._placement = self._reserve(settings, num_groups)
        except BaseException:
            self.close()
            raise

    def _start(self, settings: Cluster, num_actors: int) -> None:
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        if settings.address:
            try:
                probe(settings.address)
                self._is_ours = True
                ray.init(address=settings.address, log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, RuntimeError, ValueError) as error:
                raise ClusterError(
                    f"cluster.address={settings.address}: no Ray cluster answers there ({error}); start one with "
                    "`ray start --head`, or leave the key out to run on this machine"
                ) from error
            return
        self._folder = SessionFolder()
        self._is_ours = True
        ray.init(
            address="local",
            num_cpus=num_actors,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(self._folder.path),
            # An actor with an environment of its own gets a process of its own; those started ahead would only idle.
            _system_config={"prestart_worker_first_driver": False},
            **quiet,
        )

    def _reserve(self, settings: Cluster, num_groups: int) -> Any:
        bundle: dict[str, float] = {"CPU": num_groups}
        if self.device == "cuda":
            bundle["GPU"] = 1
        strategy = "STRICT_PACK" if settings.num_nodes == 1 else "PACK"
        placement = placement_group([bundle] * self.num_ranks, strategy=strategy)
        if not placement.wait(min(self.timeout_s, 120)):
            remove_placement_group(placement)
            raise ClusterError(
                f"{self.num_ranks} ranks of {bundle} are not free on this cluster, which has "
                f"{ray.cluster_resources()}; lower cluster.num_nodes, cluster.gpus_per_node or cluster.cpu_ranks"
            )
        return placement

    @property
    def placement(self) -> Any:
        return self._placement

    def close(self) -> None:
        """Free everything: actors, placement group, and the cluster itself where it was started here."""
        try:
            if self._placement is not None and ray.is_initialized():
                remove_placement_group(self._placement)
        finally:
            if self._is_ours:
                ray.shutdown()
            if self._folder is not None:
                self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
