"""Time limit of a run, so that it saves before its job ends (`train.save_before`)."""

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil

_BYTES_PER_S = 2e8
"""Assumed write speed of the first checkpoint; later estimates are the longest time measured."""
_MARGIN = 1.5
"""Factor on the expected time of a checkpoint: file systems are shared."""
_SLURM = "SLURM_JOB_START_TIME"
"""Environment variable with the start of a Slurm job, in seconds since 1970."""


class TimeLimit:
    """Deadline by which a run must have saved."""

    def __init__(self, limit: timedelta | None, checkpoint_bytes: int) -> None:
        """limit: time since the start of the job, or None."""
        self._end = None if limit is None else job_start() + limit.total_seconds()
        self._save_s = 1 + checkpoint_bytes / _BYTES_PER_S
        self._step_s = self._last = 0.0
        self._evaluation_s: dict[str, float] = {}
        """Longest time of each kind of evaluation so far."""

    def begin(self) -> None:
        """Start timing the first step."""
        self._last = time.time()

    @contextmanager
    def evaluating(self, kind: str) -> Iterator[None]:
        """Time a kind of evaluation, and exclude it from the time of the step."""
        start = time.time()
        try:
            yield
        finally:
            seconds = time.time() - start
            self._evaluation_s[kind] = max(self._evaluation_s.get(kind, 0.0), seconds)
            self._last += seconds

    def is_up(self, evaluations: Collection[str] = ()) -> bool:
        """Return whether another step might leave no time to save. Call once per step, before saving.

        evaluations: kinds of evaluation in the next step.
        """
        now = time.time()
        self._step_s, self._last = max(self._step_s, now - self._last), now
        needed_s = self._step_s + sum(self._evaluation_s.get(kind, 0.0) for kind in evaluations)
        return self._end is not None and now + needed_s + _MARGIN * self._save_s > self._end

    def saved(self, seconds: float) -> None:
        """Note how long a checkpoint took."""
        self._save_s = max(self._save_s, seconds)


def job_start() -> float:
    """Return the start of the Slurm job, or without Slurm of this process, in seconds since 1970."""
    if start := os.environ.get(_SLURM):
        return float(start)
    return psutil.Process().create_time()
