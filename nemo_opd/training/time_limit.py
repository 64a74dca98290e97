"""The end of a run before the time of its job is up."""

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil

_BYTES_PER_S = 2e8
"""Assumed speed of the first checkpoint; later ones are expected to take as long as the longest until then."""
_MARGIN = 1.5
"""Factor of the time that a checkpoint is expected to take: file systems are shared."""
_SLURM = "SLURM_JOB_START_TIME"
"""Variable with the time at which a job of Slurm started, in seconds since 1970."""


class TimeLimit:
    """Time until which a run must have saved."""

    def __init__(self, limit: timedelta | None, checkpoint_bytes: int) -> None:
        """limit: since the start of the job; None: none."""
        self._end = None if limit is None else job_start() + limit.total_seconds()
        self._save_s = 1 + checkpoint_bytes / _BYTES_PER_S
        self._step_s = self._last = 0.0
        self._evaluation_s: dict[str, float] = {}
        """Longest time of each kind of evaluation."""

    def begin(self) -> None:
        """Start the time of the first step."""
        self._last = time.time()

    @contextmanager
    def evaluating(self, kind: str) -> Iterator[None]:
        """Learn how long a kind of evaluation takes, which belongs to no step's time."""
        start = time.time()
        try:
            yield
        finally:
            seconds = time.time() - start
            self._evaluation_s[kind] = max(self._evaluation_s.get(kind, 0.0), seconds)
            self._last += seconds

    def is_up(self, evaluations: Collection[str] = ()) -> bool:
        """Return whether another step might leave no time to save; to be called once a step, before it is saved.

        evaluations: kinds that the next step has.
        """
        now = time.time()
        self._step_s, self._last = max(self._step_s, now - self._last), now
        needed_s = self._step_s + sum(self._evaluation_s.get(kind, 0.0) for kind in evaluations)
        return self._end is not None and now + needed_s + _MARGIN * self._save_s > self._end

    def saved(self, seconds: float) -> None:
        """Learn from a checkpoint how long one takes."""
        self._save_s = max(self._save_s, seconds)


def job_start() -> float:
    """Return when the job started, in seconds since 1970: as Slurm says, else when this process did."""
    if start := os.environ.get(_SLURM):
        return float(start)
    return psutil.Process().create_time()
