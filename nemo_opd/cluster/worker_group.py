"""The ranks of one model as a unit that the driver calls."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import ray

from nemo_opd.cluster.calls import Pending, gather
from nemo_opd.cluster.placement import Places
from nemo_opd.cluster.rank_actor import RankActor
from nemo_opd.cluster.virtual_cluster import VirtualCluster
from nemo_opd.cluster.worker_progress import ANSWER_S, Store, Watch
from nemo_opd.distributed.layout import Place
from nemo_opd.distributed.process_group import connect_store

LEAVE_S = 10.0
"""Seconds a rank may take to leave; one that hangs in a collective never does."""


class WorkerGroup:
    """`worker` on every rank of a group, in one torch.distributed world."""

    def __init__(
        self, cluster: VirtualCluster, name: str, worker: type, arguments: Mapping[str, Any], places: Places
    ) -> None:
        """Starts the processes, rank r at `places[r]` of the cluster's placement; `ready` says when they stand."""
        self.name = name
        self.cluster = cluster
        self.places = places
        self.actors = [self._actor(rank, place) for rank, place in enumerate(places)]
        self._address = self.actors[0].serve.remote()
        self._watch = Watch(name, self._store)
        cluster.watches.append(self._watch)
        shared = ray.put(dict(arguments))
        self.ready = Pending(
            name, "start", [actor.create.remote(self._address, worker, shared) for actor in self.actors]
        )

    def _actor(self, rank: int, place: Place) -> Any:
        cluster = self.cluster
        remote = ray.remote(max_restarts=0, **cluster.options(place))(RankActor)
        return remote.remote(rank, len(self.places), cluster.device, cluster.threads, cluster.timeout_s, cluster.host)

    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> Pending:
        """Call `method` on every rank, with its own arguments where given; returns at once.

        about: which batch or step it is, for messages: "student rank 0 died while training on a batch (<about>)".
        """
        per_rank = arguments if arguments is not None else [()] * len(self.actors)
        calls = zip(self.actors, per_rank, strict=True)
        return Pending(self.name, method, [actor.call.remote(method, own) for actor, own in calls], about)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> list[Any]:
        """`submit` and wait: the results by rank."""
        return self.gather([self.submit(method, arguments, about=about)])[0]

    def gather(self, calls: Sequence[Pending]) -> list[list[Any]]:
        """The results by call and rank, also of other groups. Raises WorkerError and ClusterError."""
        try:
            return gather(calls, self.cluster.timeout_s, self.cluster.services, self.cluster.watches)
        except BaseException:
            self.cluster.is_broken = True
            raise

    def address(self) -> tuple[str, int]:
        """Host and port of the store by which its ranks found each other; served by rank 0 as long as it lives."""
        host, port = ray.get(self._address)
        return host, port

    def _store(self) -> Store | None:
        """A connection to that store; None while there is none."""
        is_there, _ = ray.wait([self._address], timeout=0)
        return connect_store(*self.address(), ANSWER_S) if is_there else None

    def whereabouts(self) -> list[tuple[str, tuple[str, ...]]]:
        """Of each rank Ray's id of its node, and the names of its GPUs."""
        found: list[tuple[str, tuple[str, ...]]] = ray.get([actor.whereabouts.remote() for actor in self.actors])
        return found

    def close(self) -> None:
        """End the processes; let them release what they hold first, unless some may be waiting for each other."""
        self._watch.close()
        if not self.cluster.services.are_alive:
            return  # Workers end with Ray, and calls would wait for it.
        try:
            if not self.cluster.is_broken:
                left = [actor.leave.remote() for actor in self.actors]
                ray.wait(left, num_returns=len(left), timeout=LEAVE_S)
        finally:
            for actor in self.actors:
                ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
