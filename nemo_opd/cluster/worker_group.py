"""The ranks of one model as a unit that the driver calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_opd.cluster.rank_actor import Failure, RankActor
from nemo_opd.cluster.virtual_cluster import VirtualCluster
from nemo_opd.errors import ClusterError, WorkerError

LEAVE_S = 10.0
"""Seconds a rank may take to leave; one that hangs in a collective never does."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A call that is under way on every rank of a group."""

    group: str
    method: str
    references: list[Any]


class WorkerGroup:
    """`worker` on every rank of the cluster, in one torch.distributed world."""

    def __init__(self, cluster: VirtualCluster, name: str, worker: type, arguments: Mapping[str, Any]) -> None:
        """Starts the processes; `ready` says when the workers stand."""
        self.name = name
        self.cluster = cluster
        self.actors = [self._actor(rank) for rank in range(cluster.num_ranks)]
        self._address = self.actors[0].serve.remote()
        shared = ray.put(dict(arguments))
        self.ready = Pending(
            name, "start", [actor.create.remote(self._address, worker, shared) for actor in self.actors]
        )

    def _actor(self, rank: int) -> Any:
        cluster = self.cluster
        strategy = PlacementGroupSchedulingStrategy(cluster.placement, placement_group_bundle_index=rank)
        remote = ray.remote(num_cpus=1, num_gpus=cluster.gpu_share, scheduling_strategy=strategy, max_restarts=0)
        return remote(RankActor).remote(rank, cluster.num_ranks, cluster.device, cluster.threads, cluster.timeout_s)

    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> Pending:
        """Call `method` on every rank, with its own arguments where given; returns at once."""
        per_rank = arguments if arguments is not None else [()] * len(self.actors)
        calls = zip(self.actors, per_rank, strict=True)
        return Pending(self.name, method, [actor.call.remote(method, own) for actor, own in calls])

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """`submit` and wait: the results by rank."""
        return self.gather([self.submit(method, arguments)])[0]

    def gather(self, calls: Sequence[Pending]) -> list[list[Any]]:
        return gather(calls, self.cluster.timeout_s)

    def close(self) -> None:
        """Let the workers release what they hold, for as long as that takes a healthy one, and end the processes."""
        try:
            ray.wait([actor.leave.remote() for actor in self.actors], num_returns=len(self.actors), timeout=LEAVE_S)
        finally:
            for actor in self.actors:
                ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def gather(calls: Sequence[Pending], timeout_s: float) -> list[list[Any]]:
    """The results of several calls, by call and rank.

    Raises WorkerError for the first rank that fails, although others may then wait for it in a collective, and
    ClusterError for a process that died or when nothing finishes for `timeout_s`.
    """
    owner = {reference: (call, rank) for call in calls for rank, reference in enumerate(call.references)}
    results: dict[Any, Any] = {}
    waiting = list(owner)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        if not done:
            call, rank = owner[waiting[0]]
            raise ClusterError(
                f"{call.group} rank {rank} did not finish {call.method!r} within cluster.timeout_s={timeout_s:g}; it "
                "hangs, or the limit is too low for this model"
            )
        results[done[0]] = outcome(done[0], *owner[done[0]])
    return [[results[reference] for reference in call.references] for call in calls]


def outcome(reference: Any, call: Pending, rank: int) -> Any:
    try:
        result = ray.get(reference)
    except ray.exceptions.RayActorError as error:
        reason = str(error).strip().splitlines()[0]
        raise ClusterError(
            f"{call.group} rank {rank} died during {call.method!r} ({reason}); if memory ran out, lower "
            "train.micro_batch_size or train.max_length"
        ) from error
    except ray.exceptions.RayTaskError as error:
        raise WorkerError(call.group, rank, str(error.cause), str(error)) from error
    if isinstance(result, Failure):
        raise WorkerError(call.group, rank, result.error, result.traceback)
    return result
