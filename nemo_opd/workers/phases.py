"""Where a rank's step spends its time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

import torch

from nemo_opd.types import Max

PREFIX = "phase/"
"""Of the metrics' names."""


class Phases:
    """Seconds by phase since the last `take`; a phase inside another one is not counted in the outer.

    On CUDA the time is the device's: a phase only queues its kernels, so a host clock would charge their work to
    whatever waits for them later. An event at each change of phase costs microseconds and stops nothing; the host waits
    for them in `take` alone.
    """

    def __init__(self, device: str) -> None:
        self._mark = DeviceMark if device == "cuda" else HostMark
        self._open: list[str] = []
        self._changes: list[tuple[str | None, Mark]] = []
        """The phase that begins (None: no phase), and when."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Counts the body's time to `phase`, also when it raises."""
        self._open.append(phase)
        self._change()
        try:
            yield
        finally:
            self._open.pop()
            self._change()

    def begin(self) -> None:
        """Forget what was counted so far, without waiting for it: work that nobody asks about, such as validation."""
        self._changes = []

    def take(self) -> dict[str, Max]:
        """All phases by `phase/<name>`, which start again from zero; to be called outside of any.

        Waits on CUDA until the device has done what was queued up to the end of the last phase, so it belongs where the
        host waits for the device anyway: beside the metrics of a step.
        """
        changes, self._changes = self._changes, []
        seconds: dict[str, float] = {}
        for (phase, start), (_, end) in pairwise(changes):
            if phase is not None:
                seconds[phase] = seconds.get(phase, 0.0) + end.seconds_since(start)
        return {f"{PREFIX}{phase}": Max(duration) for phase, duration in seconds.items()}

    def _change(self) -> None:
        self._changes.append((self._open[-1] if self._open else None, self._mark()))


class Mark(Protocol):
    """A moment."""

    def seconds_since(self, earlier: "Mark") -> float: ...


class HostMark:
    def __init__(self) -> None:
        self._time = time.perf_counter()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        return self._time - earlier._time


class DeviceMark:
    """When the device's current stream gets there."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, DeviceMark)
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3
