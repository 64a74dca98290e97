"""Scores of the closing table: of the student at its first and last evaluation, and of its teachers."""

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
    """Return the measures with a confidence interval, from a run's records.

    teachers: names. values: of each question, for the differences between models that were asked the same questions.
    confidence: level of the intervals of a set, by its name.
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
    of_teachers = {
        teacher: _score(record, key, f"/{teacher}")
        for teacher in teachers
        for record in records
        if f"{key}/{teacher}" in record
    }
    has_before = first["step"] < last["step"]
    name = key.removeprefix(PREFIX)
    of_set, _, measure = name.rpartition("/")
    steps = first["step"], last["step"]
    return ScoreRow(
        name,
        _score(first, key) if has_before else None,
        _score(last, key),
        of_teachers,
        _differences(of_set, measure, values, steps, confidence(of_set)),
    )


def _score(record: _Record, key: str, of: str = "") -> Score:
    return Score(record[f"{key}{of}"], record[f"{key}_low{of}"], record[f"{key}_high{of}"])


def _differences(
    name: str, measure: str, values: Sequence[QuestionValues], steps: tuple[float, float], confidence: float
) -> dict[str, Score]:
    """Return how much better the student was at the last of two steps than at the first, and than each teacher."""
    own = [each for each in values if each.set == name and measure in each.values]
    after = next((each for each in own if each.teacher is None and each.step == steps[1]), None)
    if after is None:
        return {}
    others = {f"teacher {each.teacher}": each for each in own if each.teacher is not None}
    before = next((each for each in own if each.teacher is None and each.step == steps[0] < steps[1]), None)
    if before is not None:
        others[STUDENT_BEFORE] = before
    found = {model: difference_between(after, other, measure, confidence) for model, other in others.items()}
    return {model: difference for model, difference in found.items() if difference is not None}


def difference_between(after: QuestionValues, other: QuestionValues, measure: str, confidence: float) -> Score | None:
    """Return how much better `after` is over the questions that both were asked; None where too few were."""
    theirs = dict(zip(other.questions, other.values[measure], strict=True))
    now = dict(zip(after.questions, after.values[measure], strict=True))
    shared = [row for row in now if row in theirs]
    if not shared:
        return None
    found = paired_difference([now[row] for row in shared], [theirs[row] for row in shared], confidence)
    if not math.isfinite(found.low):
        return None
    if measure in after.lower_is_better:
        return Score(-found.value, -found.high, -found.low)
    return Score(found.value, found.low, found.high)
