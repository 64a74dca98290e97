"""Parts of a step's time, from a record of metrics."""

from collections.abc import Mapping

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
