"""The parts of a step add up to its time; a teacher that works beside the student is not one of them."""

import pytest

from nemo_opd.training.step_metrics import step_times
from nemo_opd.types import Max, Mean, Metrics

STUDENT: Metrics = {
    "ce": Mean(6.0, 2),
    **{f"phase/{name}": Max(seconds) for name, seconds in
       {"handoff": 0.5, "forward": 1.0, "loss": 2.0, "backward": 4.0, "optimizer": 8.0}.items()},
}  # fmt: skip
PARTS = ("handoff_s", "student_forward_s", "loss_s", "student_backward_s", "optimizer_s")


def test_parts_add_up_where_student_and_teachers_take_turns() -> None:
    """Bug: the step counts the sum of its teachers' times, although they run side by side."""
    spans = {"data_wait_s": 0.25, "teacher_s": 16.0, "step_s": 32.0}
    times = step_times(spans, STUDENT, {"a": 15.0, "b": 3.0})
    assert times["perf/teacher_s"] == 16.0
    assert (times["perf/teacher_s/a"], times["perf/teacher_s/b"]) == (15.0, 3.0)
    parts = ["data_wait_s", "teacher_s", *PARTS, "other_s"]
    assert sum(times[f"perf/{part}"] for part in parts) == times["perf/step_s"] == 32.0
    assert times["perf/other_s"] == 0.25
    assert set(times) == {f"perf/{name}" for name in (*parts, "step_s", "teacher_s/a", "teacher_s/b")}


def test_of_teachers_ahead_only_the_wait_for_them_is_part_of_the_step() -> None:
    spans = {"data_wait_s": 0.25, "teacher_wait_s": 0.25, "step_s": 17.0}
    times = step_times(spans, STUDENT, {"a": 15.0, "b": 3.0})
    assert times["perf/teacher_s"] == 15.0, "the slower of the two"
    parts = ["data_wait_s", "teacher_wait_s", *PARTS, "other_s"]
    assert sum(times[f"perf/{part}"] for part in parts) == 17.0


def test_a_step_that_reads_no_batch_has_waited_for_none() -> None:
    """Bug: the last steps of a run lack the metric."""
    assert step_times({"teacher_wait_s": 0.25, "step_s": 17.0}, STUDENT, {"a": 1.0})["perf/data_wait_s"] == 0.0


def test_maxima_over_ranks_may_exceed_the_step() -> None:
    """Bug: a negative remainder, which is drawn below the axis."""
    assert step_times({"step_s": 10.0}, STUDENT, {})["perf/other_s"] == 0.0


def test_without_teachers_there_is_no_time_of_theirs() -> None:
    times = step_times({"data_wait_s": 0.0, "step_s": 16.0}, STUDENT, {})
    assert not [name for name in times if "teacher" in name]
    assert times["perf/other_s"] == pytest.approx(0.5)
