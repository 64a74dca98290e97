"""Merging of metrics over microbatches and ranks, timing of phases, and the names of step times and scores."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from nemo_opd.logging.interface import is_mean
from nemo_opd.types import Metric, Metrics

STEP = "perf/step_s"
OTHER = "other"
PARTS: Mapping[str, tuple[str, ...]] = {
    "data": ("perf/data_wait_s",),
    "rollout": ("perf/rollout_s",),
    # If teachers work while the student trains, only its time of waiting for them is part of the step.
    "teachers": ("perf/teacher_wait_s", "perf/teacher_s"),
    "handoff": ("perf/handoff_s",),
    "forward": ("perf/student_forward_s",),
    "loss": ("perf/loss_s",),
    "backward": ("perf/student_backward_s",),
    "optimizer": ("perf/optimizer_s",),
    "offload": ("perf/offload_s",),
}
"""Metrics of each part, in the order of a step; the first recorded metric of a part counts."""
PREFIX = "eval/"
BITS_PER_BYTE, SHARED_BITS_PER_BYTE = "val/bits_per_byte", "val/shared_bits_per_byte"
"""The student's bits per byte over all validation bytes that it predicts, whatever the teachers, and over the bytes
that all models predict; with `/<teacher>` a teacher's.
"""
NUM_BYTES = "val/bytes"
"""Number of the bytes of BITS_PER_BYTE."""


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


def step_parts(record: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each measured part, and the remaining time as `other`; empty if the step has no time.

    Each part is the maximum over ranks, so their sum may exceed the step: `other` is then 0.
    """
    if STEP not in record:
        return {}
    measured = {name: [record[key] for key in keys if key in record] for name, keys in PARTS.items()}
    parts = {name: values[0] for name, values in measured.items() if values}
    return {**parts, OTHER: max(0.0, record[STEP] - sum(parts.values()))}


def shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Return each part divided by their sum; empty if the sum is 0."""
    total = sum(parts.values())
    return {name: seconds / total for name, seconds in parts.items()} if total > 0 else {}


def score_keys(metrics: Collection[str]) -> list[str]:
    """Return the names of the student's scores, which have an interval, in the order of `metrics`."""
    return [
        key for key in metrics if key.startswith(PREFIX) and f"{key}_low" in metrics and not _is_teachers(key, metrics)
    ]


def by_set(metrics: Collection[str]) -> dict[str, list[tuple[str, str]]]:
    """Return (measure, name) of each set's scores, except mean rewards; greedy scores come first."""
    sets: dict[str, list[tuple[str, str]]] = {}
    scores = (key for key in score_keys(metrics) if not is_mean(key))
    for key in sorted(scores, key=lambda key: not key.endswith("/greedy")):
        name, _, measure = key.removeprefix(PREFIX).rpartition("/")
        sets.setdefault(name, []).append((measure, key))
    return sets


def _is_teachers(key: str, metrics: Collection[str]) -> bool:
    """Return whether a name is a teacher's score or a bound of one; these end with the teacher's name."""
    measure, _, teacher = key.rpartition("/")
    scores = {measure, measure.removesuffix("_low"), measure.removesuffix("_high")}
    return any(all(f"{score}{end}/{teacher}" in metrics for end in ("", "_low", "_high")) for score in scores)
