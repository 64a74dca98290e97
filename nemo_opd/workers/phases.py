"""Time that a rank's step spends in each phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from nemo_opd.types import Max

PREFIX = "phase/"
"""Prefix of the metrics' names."""


class Phases:
    """Seconds by phase since the last `take`; a nested phase does not count in the outer one.

    On CUDA the device's time counts: a phase only queues its kernels, so a host clock would charge their work to
    whatever waits for them later. Each change of phase records an event, which takes microseconds; only `take` waits.
    """

    def __init__(self, device: str) -> None:
        self._now = _record_event if device == "cuda" else time.perf_counter
        self._open: list[str] = []
        self._changes: list[tuple[str | None, float | torch.cuda.Event]] = []
        """Phase that begins (None: no phase), and its start."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the body's time as `phase`, also when it raises."""
        self._open.append(phase)
        self._change()
        try:
            yield
        finally:
            self._open.pop()
            self._change()

    def begin(self) -> None:
        """Discard the counts so far without waiting: work that is not reported, such as validation."""
        self._changes = []

    def take(self) -> dict[str, Max]:
        """Return all phases as `phase/<name>` and start again from zero; call it outside of any phase.

        On CUDA it waits until the device has finished the last phase, so call it where the host waits for the device
        anyway, such as at the metrics of a step.
        """
        changes, self._changes = self._changes, []
        seconds: dict[str, float] = {}
        for (phase, start), (_, end) in pairwise(changes):
            if phase is not None:
                seconds[phase] = seconds.get(phase, 0.0) + _seconds_between(start, end)
        return {f"{PREFIX}{phase}": Max(duration) for phase, duration in seconds.items()}

    def _change(self) -> None:
        self._changes.append((self._open[-1] if self._open else None, self._now()))


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    assert not isinstance(end, torch.cuda.Event)
    return end - start
