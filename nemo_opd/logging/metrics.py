"""Merging metrics over microbatches and ranks, and timing phases."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from nemo_opd.types import Metric, Metrics


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Pool metrics by name, in the order given; a name may be missing from some parts.

    Raises TypeError where one name carries two kinds of metric.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, new in part.items():
            known = merged.get(name)
            if known is not None and type(known) is not type(new):
                kinds = f"a {type(known).__name__} in one part and a {type(new).__name__} in another"
                raise TypeError(f"metric {name!r} is {kinds}")
            merged[name] = new if known is None else known.merge(new)  # type: ignore[arg-type]  # compared above
    return merged


def values(metrics: Metrics) -> dict[str, float]:
    """Return each metric as a number. Synchronises with the device that holds it."""
    return {name: metric.value() for name, metric in metrics.items()}


class Timer:
    """Wall-clock seconds by phase; a phase entered again adds up, a nested one also counts in the outer."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Add the time of the body to `phase`, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return all phases and start again from zero."""
        taken, self._seconds = self._seconds, {}
        return taken
