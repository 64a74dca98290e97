"""The end of a run before the time of its job is up."""

import os
import time
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
        self._longest_s = 0.0
        self._last = time.time()

    def is_up(self) -> bool:
        """Return whether another step might leave no time to save; to be called once a step, before it is saved."""
        now = time.time()
        self._longest_s, self._last = max(self._longest_s, now - self._last), now
        return self._end is not None and now + self._longest_s + _MARGIN * self._save_s > self._end

    def saved(self, seconds: float) -> None:
        """Learn from a checkpoint how long one takes."""
        self._save_s = max(self._save_s, seconds)


def job_start() -> float:
    """Return when the job started, in seconds since 1970: as Slurm says, else when this process did."""
    if told := os.environ.get(_SLURM):
        return float(told)
    return psutil.Process().create_time()
