"""Early end of a run: by signals, or before a time limit."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, Self

import psutil

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals sent by Ctrl-C, a scheduler, and a closed terminal."""
ECHO_S = 1.0
"""Window of duplicate signals: timeout(1) signals a process and its group, and `uv run` forwards signals."""
_BYTES_PER_S = 2e8
"""Assumed write speed of the first checkpoint; later estimates are the longest time measured."""
_MARGIN = 1.5
"""Factor on the expected time of a checkpoint: file systems are shared."""
_SLURM = "SLURM_JOB_START_TIME"
"""Environment variable with the start of a Slurm job, in seconds since 1970."""


class SignalDebouncer:
    """Filter of duplicate signals within `ECHO_S`."""

    def __init__(self) -> None:
        self._last = -math.inf

    def is_one(self) -> bool:
        now = time.monotonic()
        if now - self._last < ECHO_S:
            return True
        self._last = now
        return False


_echoes = SignalDebouncer()
_was_requested = threading.Event()


def was_requested() -> bool:
    """Return whether a signal has asked any run in this process to end."""
    return _was_requested.is_set()


class Interrupt:
    """Signal handler: the first signal sets `requested`, the second raises KeyboardInterrupt."""

    def __init__(self, answer: Callable[[str], None]) -> None:
        """Store `answer`, which shows a text to the user and is called from a separate thread."""
        self.requested = False
        self.effect = "ending after this step"
        """What the first signal does, for the user."""
        self._answer = answer

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if _echoes.is_one():
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        _was_requested.set()
        answer = f"{self.effect}; interrupt again to end now"
        # In a thread, because the signal may have interrupted a write to the same stream.
        threading.Thread(target=self._answer, args=(answer,), daemon=True).start()

    def __enter__(self) -> Self:
        self._previous = _install(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._previous)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on each of the signals, so that resources are closed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _echoes.is_one():
            raise KeyboardInterrupt

    previous = _install(interrupt)
    try:
        yield
    finally:
        _restore(previous)


def _install(handler: Callable[[int, FrameType | None], Any]) -> dict[signal.Signals, Any]:
    """Install a handler, except for signals that are ignored (nohup), and return the previous handlers."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    previous = {number: installed for number, installed in handlers.items() if installed is not signal.SIG_IGN}
    for number in previous:
        signal.signal(number, handler)
    return previous


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


class TimeLimit:
    """Deadline by which a run must have saved."""

    def __init__(self, limit: timedelta | None, checkpoint_bytes: int) -> None:
        """limit: time since the start of the job, or None."""
        self._end = None if limit is None else time.monotonic() + limit.total_seconds() - job_age_s()
        self._save_s = 1 + checkpoint_bytes / _BYTES_PER_S
        self._step_s = self._last = 0.0
        self._evaluation_s: dict[str, float] = {}
        """Longest time of each kind of evaluation so far."""

    def begin(self) -> None:
        """Start timing the first step."""
        self._last = time.monotonic()

    @contextmanager
    def evaluating(self, kind: str) -> Iterator[None]:
        """Time a kind of evaluation, and exclude it from the time of the step."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            self._evaluation_s[kind] = max(self._evaluation_s.get(kind, 0.0), seconds)
            self._last += seconds

    def is_up(self, evaluations: Collection[str] = ()) -> bool:
        """Return whether another step might leave no time to save. Call once per step, before saving.

        evaluations: kinds of evaluation in the next step.
        """
        now = time.monotonic()
        self._step_s, self._last = max(self._step_s, now - self._last), now
        needed_s = self._step_s + sum(self._evaluation_s.get(kind, 0.0) for kind in evaluations)
        return self._end is not None and now + needed_s + _MARGIN * self._save_s > self._end

    def saved(self, seconds: float) -> None:
        """Note how long a checkpoint took."""
        self._save_s = max(self._save_s, seconds)


def job_age_s() -> float:
    """Return the seconds since the start of the Slurm job, or without Slurm of this process."""
    start = os.environ.get(_SLURM)
    return time.time() - (float(start) if start else psutil.Process().create_time())
