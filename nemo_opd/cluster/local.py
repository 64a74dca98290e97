"""A cluster without Ray: this process only, or the processes that torchrun started on this machine; and the choice of a
cluster, with Ray or without.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nemo_opd.cluster.group import CONTINUE, Call, Cluster, Failure, Group, Rank
from nemo_opd.cluster.placement import Placement, Places, Processes, num_cores, num_threads
from nemo_opd.config.cluster import Cluster as Settings
from nemo_opd.distributed import process_group
from nemo_opd.distributed.process_group import share_key, sign_objects
from nemo_opd.errors import ClusterError, ConfigError, WorkerError
from nemo_opd.logging.terminal import visible

_IDLE = timedelta(days=365)
"""Limit of a rank's wait for the driver's next call."""
_NOTICE = timedelta(seconds=10)
"""Limit of a failed rank's wait for the driver to report it."""
_DEVICE, _FAILURE, _REPORTED = "device", "failure", "reported"
"""Keys of a world's store: its device (empty: no further world), a rank's failure, and whether it was reported."""
_world_numbers = itertools.count()


class LocalCluster(Cluster):
    """The existing processes, each with a rank of every group.

    The driver runs in rank 0: it sends a call to the other ranks and then runs it itself, in the calling thread. An
    error in rank 0 is raised as the cause of a WorkerError, so that a debugger can see its frames.
    """

    def __init__(self, settings: Settings, *, device: str, placement: Placement) -> None:
        self.timeout_s = settings.timeout_s
        self.processes = Processes.started()
        assert {len(places) for places in placement.groups} == {self.processes.size}
        self.is_broken = False
        """Whether a call has failed, so that other ranks may hang in a collective."""
        self._num_threads = torch.get_num_threads()
        # One thread may sample rollouts while another trains.
        self._lock = threading.RLock()
        store = _next_store(self.processes)
        store.set(_DEVICE, device)
        self._world = _World(self.processes, store, device, settings.timeout_s)

    def group(self, name: str, worker: type, arguments: Mapping[str, Any], places: Places) -> _LocalGroup:
        return _LocalGroup(self, name, worker, arguments, places)

    def worker(self, group: str) -> Any:
        """Return this process's worker of a group, for a debugger, a notebook or a test."""
        return self._world.ranks[group].worker

    def gather(self, calls: Sequence[Call]) -> list[list[Any]]:
        return [call.results for call in calls if isinstance(call, _LocalCall)]

    def run(self, call: Call, arguments: Sequence[tuple[Any, ...]]) -> _LocalCall:
        """Run a call on all ranks. arguments: one tuple per rank. Raises WorkerError or ClusterError."""
        with self._lock:
            try:
                order = self._world.scatter([_Order(call, rank_arguments) for rank_arguments in arguments])
                assert order is not None
                results = self._world.gather(self._world.execute(order))
            except BaseException as error:
                self.is_broken = True
                if isinstance(error, Exception):
                    raise self._first_failure(error, call) from error
                raise
        return _LocalCall(call.group, call.method, call.about, results)

    def _first_failure(self, error: Exception, call: Call) -> ClusterError:
        """Return the error of this rank, or of the rank that broke this rank's collective."""
        failure, store = Failure.of(error), self._world.store
        if not failure.is_from_peer:
            store.set(_REPORTED, "")
            return failure.as_error(call, 0)
        # A failing rank writes its error before its connections close.
        if store.check([_FAILURE]):
            store.set(_REPORTED, "")
            return WorkerError(*json.loads(store.get(_FAILURE)))
        return ClusterError(
            f"{call.group}: the process of another rank died while {call.doing}; torchrun reports below which one and "
            f"why; {CONTINUE}"
        )

    def close(self) -> None:
        try:
            if not self.is_broken:
                self._world.scatter([None] * self.processes.size)
        finally:
            self._world.leave()
            torch.set_num_threads(self._num_threads)


@dataclass(frozen=True, slots=True)
class _LocalCall(Call):
    """A call that has returned."""

    results: list[Any]
    """One result per rank."""


class _LocalGroup(Group):
    """A group with one worker in each process."""

    cluster: LocalCluster

    def __init__(
        self, cluster: LocalCluster, name: str, worker: type, arguments: Mapping[str, Any], places: Places
    ) -> None:
        """Build the worker on every rank. Raises WorkerError or ClusterError."""
        super().__init__(cluster, name, places)
        self.ready = self.submit("start", [(worker, arguments)] * self.size)

    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> _LocalCall:
        """Call `method` on every rank and wait. Raises WorkerError or ClusterError."""
        return self.cluster.run(Call(self.name, method, about), [()] * self.size if arguments is None else arguments)

    def address(self) -> tuple[str, int]:
        raise AssertionError("all ranks are on one machine, so nothing is sent between nodes")

    def close(self) -> None:
        if not self.cluster.is_broken:
            self.submit("close")


def serve(timeout_s: float) -> None:
    """Execute rank 0's calls until it is done; the main loop of torchrun's other ranks.

    Exits with status 1 if this rank fails or rank 0 is gone.
    """
    # Signals reach all processes, but only rank 0 decides how the run ends.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        store = _next_store(Processes.started())
        store.wait([_DEVICE], _IDLE)
        if not (device := store.get(_DEVICE).decode()):
            return
        _serve_world(store, device, timeout_s)


def _serve_world(store: dist.Store, device: str, timeout_s: float) -> None:
    """Execute rank 0's calls in one world."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world = _World(Processes.started(), store, device, timeout_s)
    call = Call("a group", "start", "")
    try:
        while (order := world.scatter(None)) is not None:
            call = order.call
            world.gather(world.execute(order))
    except Exception as error:
        _fail(Failure.of(error), call, world)
    finally:
        world.leave()


def _fail(failure: Failure, call: Call, world: _World) -> NoReturn:
    """Exit after rank 0 has reported this rank's failure; print it here if rank 0 does not."""
    error = failure.as_error(call, world.processes.rank)
    if not failure.is_from_peer:
        world.store.set(_FAILURE, json.dumps(error.args))
        world.leave()  # breaks the collective that rank 0 waits in
        try:
            world.store.wait([_REPORTED], _NOTICE)
        except dist.DistError:
            print(visible(f"{error.traceback}\nerror: {error}"), file=sys.stderr)
    sys.exit(1)


def release() -> None:
    """End the ranks that wait in `serve` for another world."""
    if (processes := Processes.started()).size > 1:
        _next_store(processes).set(_DEVICE, "")


class _World:
    """This process's rank of every group, all in one torch.distributed world.

    Communicates each call by a scatter from rank 0 and its results by a gather to rank 0, over gloo.
    """

    def __init__(self, processes: Processes, store: dist.Store, device: str, timeout_s: float) -> None:
        """Join the world; collective. timeout_s: limit of the workers' collectives."""
        self.processes, self.store = processes, store
        if device == "cuda":
            torch.cuda.set_device(processes.local_rank)
        else:
            torch.set_num_threads(num_threads(num_cores(), processes.size))
        process_group.stay_on_this_machine()
        process_group.join(store, processes.rank, processes.size, device, timeout_s)
        self._calls = dist.new_group(backend="gloo", timeout=_IDLE)
        self.ranks: dict[str, Rank] = {}
        """This process's rank of each group, keyed by the group's name."""

    def scatter(self, orders: Sequence[_Order | None] | None) -> _Order | None:
        """Return this rank's order, or None to end the world. orders: one per rank, on rank 0 only."""
        if self.processes.size == 1:
            assert orders is not None
            return orders[0]
        received: list[_Order | None] = [None]
        dist.scatter_object_list(received, None if orders is None else list(orders), group=self._calls)
        return received[0]

    def gather(self, result: Any) -> list[Any]:
        """Return the results of all ranks on rank 0, and an empty list elsewhere."""
        if self.processes.size == 1:
            return [result]
        results = [None] * self.processes.size if self.processes.rank == 0 else None
        dist.gather_object(result, results, group=self._calls)
        return results or []

    def execute(self, order: _Order) -> Any:
        """Execute an order on this rank and return the result. Raises the worker's errors."""
        group, method = order.call.group, order.call.method
        if method == "start":
            self.ranks[group] = Rank(*order.arguments)
            return None
        if method == "close":
            self.ranks.pop(group).close()
            return None
        return self.ranks[group].call(method, order.arguments)

    def leave(self) -> None:
        """Close the remaining workers in reverse order, and leave the process group."""
        while self.ranks:
            with suppress(Exception):
                self.ranks.popitem()[1].close()
        process_group.leave()


@dataclass(frozen=True, slots=True)
class _Order:
    """A call with one rank's arguments."""

    call: Call
    arguments: tuple[Any, ...]


@cache
def _shared_store(processes: Processes) -> dist.Store:
    if processes.size == 1:
        return dist.HashStore()
    store = next(iter(dist.rendezvous("env://")))[0]
    sign_objects(share_key(dist.PrefixStore("opd/key", store), processes.rank, processes.size))
    return store


def _next_store(processes: Processes) -> dist.Store:
    """Return the store of the next world. All processes must call it equally often."""
    return dist.PrefixStore(f"opd/{next(_world_numbers)}", _shared_store(processes))


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
    from nemo_opd.cluster.ray.ray_cluster import RayCluster  # Ray takes seconds to import

    return RayCluster(settings, device=device, placement=placement)
