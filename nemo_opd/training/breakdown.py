"""The time of a step by its parts, under the names it is recorded with."""

from collections.abc import Mapping

from nemo_opd.logging.step_time import OTHER, step_parts
from nemo_opd.types import Metrics
from nemo_opd.workers.phases import PREFIX

STUDENT = ("forward", "backward")
"""Phases of the student's worker that a teacher has too."""


def step_times(spans: Mapping[str, float], student: Metrics, teachers: Mapping[str, float]) -> dict[str, float]:
    """perf/step_s and its parts, in seconds.

    spans: the driver's own, `step_s` among them. student: the phases of its workers, maxima over ranks, among other
    metrics. teachers: what each took. Where these did not take turns with the student, perf/teacher_s is the slowest of
    them, and of the step is only perf/teacher_wait_s. perf/other_s is what no part accounts for: calls between
    processes, merging metrics, moving what is offloaded.
    """
    # The last steps of a run read no batch where the teachers are ahead.
    times = {"perf/data_wait_s": 0.0} | {f"perf/{span}": seconds for span, seconds in spans.items()}
    if teachers:
        times.setdefault("perf/teacher_s", max(teachers.values()))
    times |= {f"perf/teacher_s/{name}": seconds for name, seconds in teachers.items()}
    for name, metric in student.items():
        if name.startswith(PREFIX):
            times[recorded_as(name.removeprefix(PREFIX))] = metric.value()
    return {**times, "perf/other_s": step_parts(times)[OTHER]}


def recorded_as(phase: str) -> str:
    return f"perf/student_{phase}_s" if phase in STUDENT else f"perf/{phase}_s"
