"""Merging of metrics over microbatches and ranks, and timing of phases."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from nemo_opd.types import Metric, Metrics


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Pool metrics by name, in order; a name may be missing from some parts.

    Raises TypeError if a name has two kinds of metric.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, new in part.items():
            metric = merged.get(name)
            if metric is not None and type(metric) is not type(new):
                kinds = f"a {type(metric).__name__} in one part and a {type(new).__name__} in another"
                raise TypeError(f"metric {name!r} is {kinds}")
            merged[name] = new if metric is None else metric.merge(new)  # type: ignore[arg-type]  # compared above
    return merged


def values(metrics: Metrics) -> dict[str, float]:
    """Return each metric as a number. Synchronises with the metric's device."""
    return {name: metric.value() for name, metric in metrics.items()}


class Timer:
    """Wall-clock seconds by phase. Repeated phases add up; a nested phase also counts in the outer one."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `phase`, even if it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return all phases and reset."""
        seconds, self._seconds = self._seconds, {}
        return seconds
