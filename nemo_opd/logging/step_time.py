"""Where the time of a step goes: its parts, from a record of metrics."""

from collections.abc import Mapping

STEP = "perf/step_s"
OTHER = "other"
PARTS: Mapping[str, tuple[str, ...]] = {
    "data": ("perf/data_wait_s",),
    "rollout": ("perf/rollout_s",),
    # Beside a student that trains on other devices, only what it waits for them is time of the step.
    "teachers": ("perf/teacher_wait_s", "perf/teacher_s"),
    "handoff": ("perf/handoff_s",),
    "forward": ("perf/student_forward_s",),
    "loss": ("perf/loss_s",),
    "backward": ("perf/student_backward_s",),
    "optimizer": ("perf/optimizer_s",),
    "offload": ("perf/offload_s",),
}
"""Part → its metrics, of which the first that is there counts; in the order of a step."""


def step_parts(record: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each part that was measured, and what none accounts for as `other`; empty where a step has no time.

    On several ranks a part is that of the slowest, so the parts together may exceed the step: `other` is then 0.
    """
    if STEP not in record:
        return {}
    measured = {name: [record[key] for key in keys if key in record] for name, keys in PARTS.items()}
    parts = {name: values[0] for name, values in measured.items() if values}
    return {**parts, OTHER: max(0.0, record[STEP] - sum(parts.values()))}


def shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Each part of all parts together; empty where these take no time."""
    total = sum(parts.values())
    return {name: seconds / total for name, seconds in parts.items()} if total > 0 else {}
