"""A cluster without Ray: this process alone, or the processes that torchrun has started on this machine."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nemo_opd.cluster.base import Call, Cluster, Group
from nemo_opd.cluster.failure import CONTINUE, Failure
from nemo_opd.cluster.placement import Placement, Places, num_cores
from nemo_opd.cluster.processes import Processes
from nemo_opd.cluster.rank import Rank
from nemo_opd.config.cluster import Cluster as Settings
from nemo_opd.distributed import process_group
from nemo_opd.errors import ClusterError, WorkerError

IDLE = timedelta(days=365)
"""Longest wait of a rank for the driver's next call."""
NOTICE = timedelta(seconds=10)
"""Longest wait of a rank that has failed for the driver to report it."""
DEVICE, FAILURE, REPORTED = "device", "failure", "reported"
"""Keys of a world's store: its device, empty for no world; a rank's failure; that this was reported."""
_world_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Order:
    """A call as a rank gets it."""

    call: Call
    arguments: tuple[Any, ...]


class World:
    """This process's rank of every group, all in one torch.distributed world.

    Communicates each call by a scatter from rank 0 and its results by a gather to it, over gloo.
    """

    def __init__(self, processes: Processes, store: dist.Store, device: str, timeout_s: float) -> None:
        """Collective. timeout_s: limit of the workers' collectives."""
        self.processes, self.store = processes, store
        if device == "cuda":
            torch.cuda.set_device(processes.local_rank)
        else:
            # Threads that wait for each other on busy cores cost more than they bring.
            torch.set_num_threads(max(1, num_cores() // processes.size))
        process_group.stay_on_this_machine()
        process_group.join(store, processes.rank, processes.size, device, timeout_s)
        self._calls = dist.new_group(backend="gloo", timeout=IDLE)
        self.ranks: dict[str, Rank] = {}
        """By group."""

    def scatter(self, orders: Sequence[Order | None] | None) -> Order | None:
        """Return this rank's order; None ends the world. orders: one for each rank; None on all but rank 0."""
        if self.processes.size == 1:
            assert orders is not None
            return orders[0]
        received: list[Order | None] = [None]
        dist.scatter_object_list(received, None if orders is None else list(orders), group=self._calls)
        return received[0]

    def gather(self, result: Any) -> list[Any]:
        """Return the results of all ranks on rank 0, and nothing elsewhere."""
        if self.processes.size == 1:
            return [result]
        results = [None] * self.processes.size if self.processes.rank == 0 else None
        dist.gather_object(result, results, group=self._calls)
        return results or []

    def execute(self, order: Order) -> Any:
        """Carry out an order on this rank and return the result. Raises what the worker raises."""
        group, method = order.call.group, order.call.method
        if method == "start":
            self.ranks[group] = Rank(*order.arguments)
            return None
        if method == "close":
            self.ranks.pop(group).close()
            return None
        return self.ranks[group].call(method, order.arguments)

    def leave(self) -> None:
        """Close the workers that are left, the last first, and leave the process group."""
        while self.ranks:
            with suppress(Exception):
                self.ranks.popitem()[1].close()
        process_group.leave()


@cache
def shared_store(processes: Processes) -> dist.Store:
    return dist.HashStore() if processes.size == 1 else next(iter(dist.rendezvous("env://")))[0]


def next_store(processes: Processes) -> dist.Store:
    """Return the store of the next world, which every process must count alike."""
    return dist.PrefixStore(f"opd/{next(_world_numbers)}", shared_store(processes))


class LocalCluster(Cluster):
    """The processes that are there, with a rank of every group in each.

    The driver is in rank 0, which sends a call to the others and then runs it itself, in the thread that calls. Errors
    of its own are raised as they are, as the cause of a WorkerError, so that a debugger finds their frames.
    """

    def __init__(self, settings: Settings, *, device: str, placement: Placement) -> None:
        self.timeout_s = settings.timeout_s
        self.processes = Processes.started()
        assert {len(places) for places in placement.groups} == {self.processes.size}
        self.is_broken = False
        """Whether a call has failed: other ranks may then hang in a collective."""
        self._num_threads = torch.get_num_threads()
        # Rollouts may be sampled by a thread while another one trains.
        self._lock = threading.RLock()
        store = next_store(self.processes)
        store.set(DEVICE, device)
        self._world = World(self.processes, store, device, settings.timeout_s)

    def group(self, name: str, worker: type, arguments: Mapping[str, Any], places: Places) -> LocalGroup:
        return LocalGroup(self, name, worker, arguments)

    def worker(self, group: str) -> Any:
        """Return this process's worker of a group, to be looked at in a debugger, a notebook or a test."""
        return self._world.ranks[group].worker

    def gather(self, calls: Sequence[Call]) -> list[list[Any]]:
        return [call.results for call in calls if isinstance(call, LocalCall)]

    def run(self, call: Call, arguments: Sequence[tuple[Any, ...]]) -> LocalCall:
        """Run a call on all ranks, each with its own arguments. Raises WorkerError or ClusterError."""
        with self._lock:
            try:
                order = self._world.scatter([Order(call, own) for own in arguments])
                assert order is not None
                results = self._world.gather(self._world.execute(order))
            except BaseException as error:
                self.is_broken = True
                if isinstance(error, Exception):
                    raise self._first_failure(error, call) from error
                raise
        return LocalCall(call.group, call.method, call.about, results)

    def _first_failure(self, error: Exception, call: Call) -> ClusterError:
        """Return the error of this rank, or of the one that broke a collective of this rank."""
        failure, store = Failure.of(error), self._world.store
        if not failure.is_of_a_peer:
            store.set(REPORTED, "")
            return failure.as_error(call, 0)
        # A rank that fails says so before its connections close.
        if store.check([FAILURE]):
            store.set(REPORTED, "")
            return WorkerError(*json.loads(store.get(FAILURE)))
        return ClusterError(
            f"{call.group}: the process of another rank died while {call.doing}; torchrun says below which and how; "
            f"{CONTINUE}"
        )

    def close(self) -> None:
        try:
            if not self.is_broken:
                self._world.scatter([None] * self.processes.size)
        finally:
            self._world.leave()
            torch.set_num_threads(self._num_threads)


@dataclass(frozen=True, slots=True)
class LocalCall(Call):
    """A call that has returned."""

    results: list[Any]
    """By rank."""


class LocalGroup(Group):
    """A worker in each of the processes."""

    cluster: LocalCluster

    def __init__(self, cluster: LocalCluster, name: str, worker: type, arguments: Mapping[str, Any]) -> None:
        """Returns when every rank has built its worker. Raises WorkerError or ClusterError."""
        super().__init__(cluster, name, cluster.processes.size)
        self.ready = self.submit("start", [(worker, arguments)] * self.size)

    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> LocalCall:
        """Call `method` on every rank; returns when all have. Raises WorkerError or ClusterError."""
        return self.cluster.run(Call(self.name, method, about), [()] * self.size if arguments is None else arguments)

    def address(self) -> tuple[str, int]:
        raise AssertionError("all ranks are on one machine, so nothing is sent between nodes")

    def close(self) -> None:
        if not self.cluster.is_broken:
            self.submit("close")


def serve(timeout_s: float) -> None:
    """Carry out rank 0's calls until it is done: the whole work of another rank of torchrun.

    Exits with status 1 where this rank fails or rank 0 is gone.
    """
    # What a person or a scheduler sends reaches all processes; rank 0 decides what becomes of the run.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while announced := next_world():
        serve_world(*announced, timeout_s)


def next_world() -> tuple[dist.Store, str] | None:
    """Wait for rank 0's next world: its store and device; None where there is none any more."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    store = next_store(Processes.started())
    store.wait([DEVICE], IDLE)
    device = store.get(DEVICE).decode()
    return (store, device) if device else None


def serve_world(store: dist.Store, device: str, timeout_s: float) -> None:
    """Carry out rank 0's calls in one world."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world = World(Processes.started(), store, device, timeout_s)
    call = Call("a group", "start", "")
    try:
        while (order := world.scatter(None)) is not None:
            call = order.call
            world.gather(world.execute(order))
    except Exception as error:
        fail(Failure.of(error), call, world)
    finally:
        world.leave()


def fail(failure: Failure, call: Call, world: World) -> NoReturn:
    """Exit, after rank 0 has reported this rank's failure; where it cannot, it is printed here."""
    error = failure.as_error(call, world.processes.rank)
    if not failure.is_of_a_peer:
        world.store.set(FAILURE, json.dumps(error.args))
        world.leave()  # which breaks the collective that rank 0 waits in
        try:
            world.store.wait([REPORTED], NOTICE)
        except dist.DistError:
            print(error.traceback, f"error: {error}", sep="\n", file=sys.stderr)
    sys.exit(1)


def release() -> None:
    """Let the ranks go that wait in `serve` for another world."""
    if (processes := Processes.started()).size > 1:
        next_store(processes).set(DEVICE, "")
