"""Timing of the phases of a rank's step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise

import torch
from torch import Tensor

from nemo_opd.types import Max, Metric

PREFIX = "phase/"
"""Prefix of the metrics' names."""


class Phases:
    """Seconds per phase since the last `take`; the outer phase excludes nested ones.

    On CUDA device time is measured: a phase only queues its kernels, so a host clock would charge their work to
    whichever phase waits for them. Each change of phase records an event, which takes microseconds; only `take` waits.
    """

    def __init__(self, device: str) -> None:
        self._now = _record_event if device == "cuda" else time.perf_counter
        self._open: list[str] = []
        self._changes: list[tuple[str | None, float | torch.cuda.Event]] = []
        """Phase that begins, or None outside any phase, and its start."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the body's time as `phase`, even if it raises."""
        self._open.append(phase)
        self._change()
        try:
            yield
        finally:
            self._open.pop()
            self._change()

    def begin(self) -> None:
        """Discard the time so far without waiting, for example after validation, which is not reported."""
        self._changes = []

    def take(self) -> dict[str, Max]:
        """Return all phases as `phase/<name>` and restart from zero. Call it outside any phase.

        On CUDA it waits until the device has finished the last phase, so call it when the host waits anyway, such as
        when reading a step's metrics.
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


def with_numbers(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Replace tensors in the metrics by numbers, with a single wait for the device."""
    values = {
        (name, field.name): getattr(metric, field.name) for name, metric in metrics.items() for field in fields(metric)
    }
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    if tensors:
        values |= zip(tensors, torch.stack([value.double() for value in tensors.values()]).tolist(), strict=True)
    return {
        name: type(metric)(**{field.name: float(values[name, field.name]) for field in fields(metric)})
        for name, metric in metrics.items()
    }
