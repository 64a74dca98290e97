"""Calls to ranks, and the wait for them: which rank failed, in what, and why."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from nemo_opd.cluster.base import Call
from nemo_opd.cluster.failure import Failure, PeerError
from nemo_opd.cluster.ray.death import obituary
from nemo_opd.cluster.ray.progress import Watch
from nemo_opd.cluster.ray.services import Services
from nemo_opd.errors import ClusterError, WorkerError

CHECK_S = 1.0
"""Seconds between two looks at whether Ray itself is still there."""
CAUSE_S = 5.0
"""Seconds for the rank that broke a collective to be found out, after another one has noticed."""


@dataclass(frozen=True, slots=True)
class RayCall(Call):
    """A call on the actors of a group."""

    references: list[Any]
    """Ray's, by rank."""


def gather(
    calls: Sequence[Call], timeout_s: float, services: Services | None = None, watches: Sequence[Watch] = ()
) -> list[list[Any]]:
    """The results of several calls, by call and rank. watches: looked at now and then while nothing returns.

    Raises WorkerError for the first rank that fails, although others may then wait for it in a collective, and
    ClusterError for a process that died, for Ray that did, or when nothing finishes for `timeout_s`.
    """
    waiting = Waiting(calls, services or Services(), watches)
    try:
        while waiting.references:
            waiting.next(timeout_s)
    finally:
        for watch in watches:
            watch.clear()
    return [[waiting.results[reference] for reference in references(call)] for call in calls]


def references(call: Call) -> list[Any]:
    assert isinstance(call, RayCall)
    return call.references


class Waiting:
    """Calls of which some have not returned."""

    def __init__(self, calls: Sequence[Call], services: Services, watches: Sequence[Watch]) -> None:
        self._owner = {reference: (call, rank) for call in calls for rank, reference in enumerate(references(call))}
        self._services, self._watches = services, watches
        self.references = list(self._owner)
        self.results: dict[Any, Any] = {}

    def next(self, timeout_s: float) -> None:
        """Take in the next result. Raises what `gather` does."""
        reference = self._next_done(timeout_s)
        if reference is None:
            raise ClusterError(self._overdue(timeout_s))
        try:
            self.results[reference] = outcome(reference, *self._owner[reference])
        except PeerError as error:
            self._raise_cause(error)
        except UnreachableError:
            self._wait_for_services_to_end()
            raise

    def _next_done(self, timeout_s: float) -> Any:
        """A reference that is no longer waited for; None where none came in time."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            done, self.references = ray.wait(self.references, num_returns=1, timeout=min(CHECK_S, left_s))
            if done:
                return done[0]
            self._services.require_alive()
            for watch in self._watches:
                watch.look()
        return None

    def _raise_cause(self, noticed: PeerError) -> None:
        """Others may say why a collective broke: a rank that died is known to Ray a moment later than to its peers."""
        deadline = time.monotonic() + CAUSE_S
        while self.references and (left_s := deadline - time.monotonic()) > 0:
            reference = self._next_done(left_s)
            if reference is None:
                break
            try:
                outcome(reference, *self._owner[reference])
            except PeerError:
                continue
        raise WorkerError(noticed.group, noticed.rank, noticed.error, noticed.traceback)

    def _wait_for_services_to_end(self) -> None:
        """Raises ClusterError if they do: ranks cannot be reached a moment before Ray has gone."""
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            self._services.require_alive()
            time.sleep(0.1)

    def _overdue(self, timeout_s: float) -> str:
        call, _ = self._owner[self.references[0]]
        ranks = [rank for owner, rank in map(self._owner.__getitem__, self.references) if owner is call]
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return (
            f"{call.group} {which}: still {call.doing} after cluster.timeout_s={timeout_s:g} seconds; it hangs, or the "
            "limit is too low for this model"
        )


class UnreachableError(ClusterError):
    """A rank of which Ray does not know whether it is still there."""


def outcome(reference: Any, call: Call, rank: int) -> Any:
    try:
        result = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        told = str(error.cause).strip().partition("\n")[0]
        raise WorkerError(call.group, rank, f"{told} (while {call.doing})", str(error)) from error
    except ray.exceptions.RayError as error:
        kind = UnreachableError if isinstance(error, ray.exceptions.ActorUnavailableError) else ClusterError
        raise kind(f"{call.group} rank {rank} died while {call.doing} {obituary(error)}") from error
    if isinstance(result, Failure):
        raise result.as_error(call, rank)
    return result
