"""Scores of the closing table: the student's at its first and last evaluation, and its teachers'."""

import math
from collections.abc import Callable, Mapping, Sequence

from nemo_opd.evaluation.estimates import paired_difference
from nemo_opd.logging.base import STUDENT_BEFORE, Score, ScoreRow
from nemo_opd.logging.question_values import QuestionValues
from nemo_opd.logging.score_keys import PREFIX, score_keys

_Record = Mapping[str, float]


def scores(
    records: Sequence[_Record],
    teachers: Sequence[str],
    values: Sequence[QuestionValues],
    confidence: Callable[[str], float],
) -> tuple[ScoreRow, ...]:
    """Return a row for each measure with a confidence interval in a run's records.

    teachers: names. values: values per question, for differences between models that answered the same questions.
    confidence: function from the name of a set to the level of its intervals.
    """
    keys = dict.fromkeys(key for record in records for key in record)
    return tuple(_row(key, records, teachers, values, confidence) for key in score_keys(keys))


def _row(
    key: str,
    records: Sequence[_Record],
    teachers: Sequence[str],
    values: Sequence[QuestionValues],
    confidence: Callable[[str], float],
) -> ScoreRow:
    first, *_, last = [record for record in records if key in record] * 2
    teacher_scores = {
        teacher: _score(record, key, f"/{teacher}")
        for teacher in teachers
        for record in records
        if f"{key}/{teacher}" in record
    }
    has_before = first["step"] < last["step"]
    name = key.removeprefix(PREFIX)
    set_name, _, measure = name.rpartition("/")
    steps = first["step"], last["step"]
    return ScoreRow(
        name,
        _score(first, key) if has_before else None,
        _score(last, key),
        teacher_scores,
        _differences(set_name, measure, values, steps, confidence(set_name)),
    )


def _score(record: _Record, key: str, suffix: str = "") -> Score:
    return Score(record[f"{key}{suffix}"], record[f"{key}_low{suffix}"], record[f"{key}_high{suffix}"])


def _differences(
    set_name: str, measure: str, values: Sequence[QuestionValues], steps: tuple[float, float], confidence: float
) -> dict[str, Score]:
    """Return how much better the student is at the second of two steps than at the first, and than each teacher."""
    entries = [entry for entry in values if entry.set == set_name and measure in entry.values]
    student_by_step: dict[float, QuestionValues] = {entry.step: entry for entry in entries if entry.teacher is None}
    after = student_by_step.get(steps[1])
    if after is None:
        return {}
    baselines = {f"teacher {entry.teacher}": entry for entry in entries if entry.teacher is not None}
    if steps[0] < steps[1] and steps[0] in student_by_step:
        baselines[STUDENT_BEFORE] = student_by_step[steps[0]]
    differences = {
        name: difference_between(after, baseline, measure, confidence) for name, baseline in baselines.items()
    }
    return {name: difference for name, difference in differences.items() if difference is not None}


def difference_between(
    after: QuestionValues, baseline: QuestionValues, measure: str, confidence: float
) -> Score | None:
    """Return how much better `after` is on the questions that both answered; None if these are too few."""
    baseline_values = dict(zip(baseline.questions, baseline.values[measure], strict=True))
    after_values = dict(zip(after.questions, after.values[measure], strict=True))
    shared = [row for row in after_values if row in baseline_values]
    if not shared:
        return None
    pairs = [after_values[row] for row in shared], [baseline_values[row] for row in shared]
    difference = paired_difference(*pairs, confidence)
    if not math.isfinite(difference.low):
        return None
    if measure in after.lower_is_better:
        return Score(-difference.value, -difference.high, -difference.low)
    return Score(difference.value, difference.low, difference.high)
