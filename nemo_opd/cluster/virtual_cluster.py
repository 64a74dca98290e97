"""The resources of a run: a bundle for each of its devices, on a Ray cluster that is started if need be."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import psutil
import ray
from ray.exceptions import AuthenticationError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_opd.cluster.nodes import choose_nodes, reserve
from nemo_opd.cluster.placement import Placement
from nemo_opd.cluster.privacy import LOOPBACK, forget, private_start, require_token
from nemo_opd.cluster.services import Services, end, in_a_session_of_their_own, of_sessions
from nemo_opd.cluster.session_folder import SessionFolder
from nemo_opd.cluster.worker_progress import Watch
from nemo_opd.config.cluster import Cluster
from nemo_opd.distributed.layout import Place
from nemo_opd.errors import ClusterError

OBJECT_STORE_BYTES = 200 * 2**20
"""Of a local cluster: ids, masks and handles of a few batches."""
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
SYSTEM = {
    # An actor with an environment of its own gets a process of its own; those started ahead would only idle.
    "prestart_worker_first_driver": False,
    # Ray lowers the priority of workers in favour of its own processes, and so of whatever else runs on the machine.
    "worker_niceness": 0,
    # No record of each call, which a dashboard would show: there is none, and Ray's store would grow for a whole run.
    "task_events_report_interval_ms": 0,
}
STARTS = 2
"""Tries to start a local cluster: Ray itself waits for half a minute, which is too short on a very busy machine."""
RESERVE_S = 120.0
"""Longest wait for devices that others may still be giving back."""


def num_cores() -> int:
    """Cores this process may run on."""
    return len(psutil.Process().cpu_affinity() or ()) or os.cpu_count() or 1


def probe(address: str) -> None:
    """Raise OSError at once where nothing listens at `host:port`, and where a cluster does but does not accept this
    process's token, AuthenticationError: Ray itself would try for long. RayError for what is no Ray cluster.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()
        if "://" not in address:
            require_token(address)


@contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Put back on leaving what Ray replaces: its handler of SIGTERM would end the process at once.

    Raises KeyboardInterrupt for a signal that has come meanwhile.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as end:  # what Ray's handler raises
        raise KeyboardInterrupt from end
    finally:
        signal.signal(signal.SIGTERM, before)


class VirtualCluster:
    """The devices of a placement: a bundle for each, with room for an actor of every group that is there.

    On GPU, actors that share a device each take an equal share of it.
    """

    def __init__(self, settings: Cluster, *, device: str, placement: Placement) -> None:
        """Raises ClusterError where the resources are not there within `cluster.timeout_s`."""
        self.device = device
        self.placement = placement
        self.timeout_s = settings.timeout_s
        per_device, per_node = placement.groups_per_device, -(-placement.num_processes // placement.num_nodes)
        self.gpu_share = int(10_000 / per_device) / 10_000 if device == "cuda" else 0.0
        # Threads that wait for each other on busy cores cost more than they bring.
        self.threads = max(1, num_cores() // per_node) if device == "cpu" else 1
        self._is_ours = False
        """Whether this process's Ray session is to be ended by `close`."""
        self._folder: SessionFolder | None = None
        self._sessions: set[int] = set()
        """Those of Ray's processes. What a process that was killed has just started is found by them."""
        self._reserved: Any = None
        self.host = LOOPBACK if placement.num_nodes == 1 else None
        """Where the ranks of a group meet; None: at the address of a node, which others can reach."""
        self.services = Services()
        self.watches: list[Watch] = []
        """How far the groups on it are."""
        self.is_broken = False
        """Whether a call has failed: ranks may then hang in a collective, and whoever asks them to leave waits too."""
        try:
            if settings.address:
                self._join(settings.address)
            else:
                self._start()
            self._reserved = self._reserve()
        except BaseException:
            self.close()
            raise

    def _join(self, address: str) -> None:
        try:
            probe(address)
            self._is_ours = True
            with own_signal_handlers():
                ray.init(address=address, **QUIET)
        except AuthenticationError as error:
            raise ClusterError(
                f"cluster.address={address}: the cluster asks for a token that this process does not have; set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token that the cluster was started "
                "with"
            ) from error
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise ClusterError(
                f"cluster.address={address}: no Ray cluster answers there ({error}); start one with "
                "`ray start --head`, or leave the key out to run on this machine"
            ) from error
        self.services = Services.elsewhere()

    def _start(self) -> None:
        for start in range(1, STARTS + 1):
            try:
                self._start_once()
                return
            except ClusterError:
                raise
            except Exception as error:  # Ray raises nothing more special
                self.close()
                if start == STARTS:
                    raise ClusterError(
                        f"Ray did not start on this machine in {STARTS} tries ({error}); end what keeps its processors "
                        "or memory busy, or start Ray with `ray start --head` and give cluster.address"
                    ) from error

    def _start_once(self) -> None:
        self._folder = SessionFolder()
        self._is_ours = True
        with own_signal_handlers(), private_start(), in_a_session_of_their_own():
            ray.init(
                address="local",
                num_cpus=self.placement.num_processes,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(self._folder.for_ray),
                _system_config=SYSTEM,
                **QUIET,
            )
        started = self._folder.processes()
        self._sessions |= {process.pid for process in started}
        self.services = Services.among(started)

    def _reserve(self) -> Any:
        """One placement group; with several nodes, each bundle on the node that its place says."""
        bundle = self._bundle()
        timeout_s = min(self.timeout_s, RESERVE_S)
        nodes = None
        if self.placement.num_nodes > 1:
            per_node = {name: count * self.placement.devices_per_node for name, count in bundle.items()}
            chosen = choose_nodes(self.placement.num_nodes, per_node, timeout_s)
            nodes = [chosen[place.node] for place in self.placement.devices]
        reserved = reserve([bundle] * len(self.placement.devices), nodes, timeout_s)
        if reserved is None:
            raise ClusterError(
                f"{len(self.placement.devices)} ranks of {bundle} are not free on this cluster, which has "
                f"{ray.cluster_resources()}; lower cluster.num_nodes, cluster.gpus_per_node or cluster.cpu_ranks"
            )
        return reserved

    def _bundle(self) -> dict[str, float]:
        bundle: dict[str, float] = {"CPU": self.placement.groups_per_device}
        return bundle | {"GPU": 1} if self.device == "cuda" else bundle

    def options(self, place: Place) -> dict[str, Any]:
        """How an actor at this place is started."""
        index = self.placement.devices.index(place)
        strategy = PlacementGroupSchedulingStrategy(self._reserved, placement_group_bundle_index=index)
        return {"num_cpus": 1, "num_gpus": self.gpu_share, "scheduling_strategy": strategy}

    def close(self) -> None:
        """Free everything: Ray's session, actors and placement group with it, and a cluster that was started here."""
        started = self._folder.processes() if self._folder else []
        self._sessions |= {process.pid for process in started}
        try:
            if self._is_ours:
                ray.shutdown()
                forget()
        finally:
            end(started)
            end(of_sessions(self._sessions))
            if self._folder:
                self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
