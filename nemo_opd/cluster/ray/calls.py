"""Calls to ranks: the wait for their results, reports of failures, and the display of a group's current work."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ray
from torch.distributed import Store

from nemo_opd.cluster.group import CONTINUE, Call, Failure, PeerError
from nemo_opd.cluster.ray.services import Services
from nemo_opd.errors import ClusterError, WorkerError
from nemo_opd.progress import Work, announced, current

KEY = "progress"
ANSWER_S = 5.0
"""Limit of the wait for the store."""
_INTERVAL_S = 1.0
_CHECK_S = 1.0
"""Seconds between checks that Ray itself is alive."""
_CAUSE_S = 5.0
"""Seconds to wait for the error of the rank that broke a collective, after another rank has reported it."""
_MEMORY = "host memory may have run out: lower train.micro_batch_size or train.max_length, or use more nodes"


@dataclass(frozen=True, slots=True)
class RayCall(Call):
    """A call on the actors of a group."""

    references: list[Any]
    """Ray's object reference for each rank."""


def gather(
    calls: Sequence[Call],
    timeout_s: float,
    services: Services | None = None,
    monitors: Sequence[ProgressMonitor] = (),
    pending: Sequence[Call] = (),
) -> list[list[Any]]:
    """Wait for calls; return each call's results, one per rank.

    monitors: updated while nothing returns. pending: other calls in progress, which may reveal the cause of an error.
    Raises WorkerError for the first rank that fails, even if other ranks still wait for it in a collective, and
    ClusterError if a process or Ray has died, or if nothing finishes for `timeout_s`.
    """
    waiting = _Waiting(calls, services or Services(), monitors, pending)
    try:
        while waiting.references:
            waiting.next(timeout_s)
    finally:
        for monitor in monitors:
            monitor.clear()
    return [[waiting.results[reference] for reference in _references(call)] for call in calls]


def _references(call: Call) -> list[Any]:
    assert isinstance(call, RayCall)
    return call.references


class _Waiting:
    """Calls whose results are awaited, and the results so far."""

    def __init__(
        self, calls: Sequence[Call], services: Services, monitors: Sequence[ProgressMonitor], pending: Sequence[Call]
    ) -> None:
        self._owner = {
            reference: (call, rank) for call in (*calls, *pending) for rank, reference in enumerate(_references(call))
        }
        self._services, self._monitors = services, monitors
        self.references = [reference for call in calls for reference in _references(call)]
        self._pending = [reference for call in pending for reference in _references(call)]
        self.results: dict[Any, Any] = {}

    def next(self, timeout_s: float) -> None:
        """Store the next result. Raises the same errors as `gather`."""
        reference = self._next_done(timeout_s)
        if reference is None:
            raise ClusterError(self._overdue(timeout_s))
        try:
            self.results[reference] = _outcome(reference, *self._owner[reference])
        except PeerError as error:
            self._raise_cause(error)
        except _UnreachableError:
            self._wait_for_services_to_end()
            raise

    def _next_done(self, timeout_s: float) -> Any:
        """Remove and return the next finished reference, or None if none finishes in time."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            done, self.references = ray.wait(self.references, num_returns=1, timeout=min(_CHECK_S, left_s))
            if done:
                return done[0]
            self._services.require_alive()
            for monitor in self._monitors:
                monitor.look()
        return None

    def _raise_cause(self, noticed: PeerError) -> None:
        """Raise the error of the rank that broke a collective or handoff, or `noticed` if that does not appear.

        Ray notices the death of a rank a moment later than the rank's peers.
        """
        self.references += self._pending
        deadline = time.monotonic() + _CAUSE_S
        while self.references and (left_s := deadline - time.monotonic()) > 0:
            reference = self._next_done(left_s)
            if reference is None:
                break
            try:
                _outcome(reference, *self._owner[reference])
            except PeerError:
                continue
        raise WorkerError(noticed.group, noticed.rank, noticed.error, noticed.traceback)

    def _wait_for_services_to_end(self) -> None:
        """Raise ClusterError if Ray ends within `_CAUSE_S`: ranks become unreachable a moment before Ray ends."""
        deadline = time.monotonic() + _CAUSE_S
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


class _UnreachableError(ClusterError):
    """Error of a rank that cannot be reached, whether or not its process is alive."""


def _outcome(reference: Any, call: Call, rank: int) -> Any:
    """Return the result of a finished call. Raises WorkerError and ClusterError."""
    try:
        result = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = _import_error(str(error)) or str(error.cause).strip().partition("\n")[0]
        raise WorkerError(call.group, rank, f"{cause} (while {call.doing})", str(error)) from error
    except ray.exceptions.RayError as error:
        kind = _UnreachableError if isinstance(error, ray.exceptions.ActorUnavailableError) else ClusterError
        raise kind(f"{call.group} rank {rank} died while {call.doing} {death_message(error)}") from error
    if isinstance(result, Failure):
        raise result.as_error(call, rank)
    return result


def _import_error(text: str) -> str | None:
    """Return why a rank's process could not import its code, and the remedy; None for any other Ray error."""
    if "failed to import on the worker" not in text:
        return None
    cause = text.strip().splitlines()[-1].strip()
    return (
        f"its process cannot import its code: {cause}; Ray's workers look for modules in the working directory "
        "first: if a file there has the name of a package, rename it or start the run elsewhere; otherwise install the "
        "package on all nodes"
    )


def death_message(error: Exception) -> str:
    """Return why a rank's process ended, in parentheses, and the remedy."""
    text = " ".join(str(error).split())
    if (cause := _import_error(str(error))) is not None:
        return f"({cause})"
    address = re.search(r"\bip: ([0-9a-f.:]+)", text)
    where = f" on {address[1]}" if address else ""
    if "node has died" in text:
        return f"(its Ray node{where} is gone); start the node again, or lower cluster.num_nodes; {CONTINUE}"
    if isinstance(error, ray.exceptions.OutOfMemoryError) or "low on memory" in text:
        return f"(Ray ended its process{where}, as the memory of the node was nearly full); {_MEMORY}; {CONTINUE}"
    if "process has died" in text:
        return f"(its process{where} was killed or crashed); {_MEMORY}; {CONTINUE}"
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return f"(its process{where} cannot be reached any more); {CONTINUE}"
    return f"({text.partition('. ')[0].rstrip('.')}); {CONTINUE}"


class ProgressReporter:
    """A thread that writes the current work of this process into the store."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        """Start the thread. connect: opens a connection for this thread only."""
        self._connect = connect
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            store, written = self._connect(), encoded(None)
            while not self._closed.wait(_INTERVAL_S):
                if (work := encoded(current())) != written:
                    store.set(KEY, work)
                    written = work
        except RuntimeError:
            return  # the store has ended, so nobody reads

    def close(self) -> None:
        self._closed.set()
        self._thread.join(ANSWER_S)


class ProgressMonitor:
    """Display of one group's current work in the driver.

    A thread reads the store, because a stopped process never answers, and waiting for it would block signals.
    """

    def __init__(self, group: str, connect: Callable[[], Store | None]) -> None:
        """connect: returns the group's store, or None if it is not served yet; called from the thread."""
        self._group, self._connect = group, connect
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        self._is_active, self._is_closed = False, threading.Event()
        self._latest: Work | None = None
        self._displayed: Work | None = None
        self._announced = ExitStack()

    def look(self) -> None:
        """Show the group's latest work, without waiting. After an error the store is not read again."""
        self._is_active = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"progress of {self._group}", daemon=True)
            self._thread.start()
        self._show(self._latest)

    def _run(self) -> None:
        try:
            while not self._is_closed.is_set():
                if self._is_active:
                    self._store = self._store or self._connect()
                    work = self._read(self._store) if self._store is not None else None
                    self._latest = work if self._is_active else None
                self._is_closed.wait(_INTERVAL_S)
        except Exception:  # the call reports the failure
            self._latest = None

    def _read(self, store: Store) -> Work | None:
        fields = json.loads(store.get(KEY)) if store.check([KEY]) else None
        if fields is None:
            return None
        name, total, unit, done, elapsed_s = fields
        return Work(f"{self._group}: {name}", total, unit, done, started=time.monotonic() - elapsed_s)

    def _show(self, work: Work | None) -> None:
        old = self._displayed
        if old is not None and work is not None and (old.name, old.total) == (work.name, work.total):
            old.done, old.started = work.done, work.started
            return
        self._hide()
        if work is not None:
            self._announced.enter_context(announced(work))
            self._displayed = work

    def _hide(self) -> None:
        self._announced.close()
        self._displayed = None

    def clear(self) -> None:
        """Hide the work, and stop reading until the next look."""
        self._is_active, self._latest = False, None
        self._hide()

    def close(self) -> None:
        """Tell the thread to end, without waiting for it: the store may never answer."""
        self._is_closed.set()
        self.clear()


def encoded(work: Work | None) -> str:
    """Encode the work as JSON."""
    return json.dumps(work and [work.name, work.total, work.unit, work.look(), round(work.elapsed_s, 1)])
