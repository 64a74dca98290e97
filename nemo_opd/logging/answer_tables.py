"""Tables of questions: accuracy by initial difficulty or by a level column, and answers that changed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from nemo_opd.logging.formats import is_mean, is_share, share
from nemo_opd.logging.group_tables import NOTHING, TextTable
from nemo_opd.logging.question_values import QuestionValues

_LEVELS = ("never right at the start", "up to a third", "up to two thirds", "more than two thirds", "always right")
_MOST_SHOWN = 20
"""Largest number of question rows, and of levels, in a table."""
_OTHERS = "others"
_Values = Mapping[str, float]
"""Share of right answers by question."""


def answer_tables(values: Sequence[QuestionValues]) -> list[TextTable]:
    """Return the tables of each set that the student answered at least twice."""
    tables: list[TextTable] = []
    for name in dict.fromkeys(line.set for line in values):
        of_set = [line for line in values if line.set == name]
        measures = dict.fromkeys(measure for line in of_set for measure in line.values)
        shares = [measure for measure in measures if is_share(measure) and not is_mean(measure)]
        sampled = next((measure for measure in shares if measure == "pass@1"), next(iter(shares), None))
        single = "greedy" if "greedy" in shares else sampled
        if sampled is None:
            continue
        candidates = (
            _by_difficulty(name, sampled, of_set),
            _by_level(name, sampled, of_set),
            _changed(name, single, of_set),
        )
        tables += [table for table in candidates if table is not None]
    return tables


def _answers(measure: str, values: Sequence[QuestionValues], teacher: str | None) -> list[tuple[int, _Values]]:
    """Return (step, values by question) of each evaluation of a model, if all values are between 0 and 1."""
    evaluations = [
        (line.step, dict(zip(line.questions, line.values[measure], strict=True)))
        for line in values
        if line.teacher == teacher and measure in line.values
    ]
    return [(step, answers) for step, answers in evaluations if all(0 <= value <= 1 for value in answers.values())]


def _by_difficulty(name: str, measure: str, values: Sequence[QuestionValues]) -> TextTable | None:
    """Return the means over questions with the same share of right samples at the student's first evaluation."""
    (_, first), *_ = _answers(measure, values, None) or [(0, {})]
    groups = {label: [row for row, value in first.items() if _level(value) == i] for i, label in enumerate(_LEVELS)}
    return _means(f"{_title(name, measure)} by difficulty", groups, measure, values)


def _by_level(name: str, measure: str, values: Sequence[QuestionValues]) -> TextTable | None:
    """Return the means over questions with the same level: the most frequent levels, then a row for all other ones."""
    level_of = {row: level for line in values for row, level in zip(line.questions, line.levels, strict=False)}
    frequent = [level for level, _ in Counter(level_of.values()).most_common(_MOST_SHOWN)]
    groups: dict[str, list[str]] = {level: [] for level in sorted(frequent, key=_natural_order)}
    for row, level in level_of.items():
        groups.setdefault(level if level in frequent else _OTHERS, []).append(row)
    return _means(f"{_title(name, measure)} by level", groups, measure, values)


def _natural_order(level: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers within texts by value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", level)]


def _means(
    title: str, groups: Mapping[str, Sequence[str]], measure: str, values: Sequence[QuestionValues]
) -> TextTable | None:
    """Return the means over groups of questions, of the student before and after and of its teachers."""
    student = _answers(measure, values, None)
    if len(student) < 2 or not any(groups.values()):
        return None
    (_, first), (last_step, last) = student[0], student[-1]
    names = dict.fromkeys(line.teacher for line in values if line.teacher is not None)
    teachers = {teacher: answers[-1][1] for teacher in names if (answers := _answers(measure, values, teacher))}
    rows = [
        [label, f"{len(rows):,}", *(_mean(rows, model) for model in (first, last, *teachers.values()))]
        for label, rows in groups.items()
        if rows
    ]
    heads = ["", "questions", "before", f"after step {last_step:,}", *(f"teacher {teacher}" for teacher in teachers)]
    return TextTable(title, heads, rows)


def _level(value: float) -> int:
    if value in (0, 1):
        return 0 if value == 0 else len(_LEVELS) - 1
    return 1 + (value > 1 / 3 + 1e-9) + (value > 2 / 3 + 1e-9)


def _mean(questions: Sequence[str], values: _Values) -> str:
    answered = [values[row] for row in questions if row in values]
    return share(fmean(answered)) if answered else NOTHING


def _changed(name: str, measure: str | None, values: Sequence[QuestionValues]) -> TextTable | None:
    """Return questions by whether the first and last answers were right, i.e. at least half of the samples were."""
    student = [answers for _, answers in _answers(measure, values, None)] if measure else []
    if len(student) < 2:
        return None
    common = [row for row in student[0] if all(row in answers for answers in student)]
    right = {row: [answers[row] >= 0.5 for answers in student] for row in common}
    kinds = {
        "wrong, now right": [row for row, seen in right.items() if not seen[0] and seen[-1]],
        "right, now wrong": [row for row, seen in right.items() if seen[0] and not seen[-1]],
        "right in between, wrong again": [
            row for row, seen in right.items() if not (seen[0] or seen[-1]) and any(seen)
        ],
        "wrong in between, right again": [row for row, seen in right.items() if seen[0] and seen[-1] and not all(seen)],
        "right throughout": [row for row, seen in right.items() if all(seen)],
        "wrong throughout": [row for row, seen in right.items() if not any(seen)],
    }
    changes = sum(now != then for seen in right.values() for then, now in pairwise(seen))
    rows = [
        [kind, f"{len(questions):,}", "" if kind.endswith("throughout") else _listed(questions)]
        for kind, questions in kinds.items()
        if questions
    ]
    rows.append(["changes from one evaluation to the next", f"{changes:,}", ""])
    return TextTable(f"{_title(name, measure or '')}: answers that changed", ["", "questions", "rows"], rows)


def _title(name: str, measure: str) -> str:
    return f"Questions{f' of {name}' * bool(name)}, {measure}"


def _listed(rows: Sequence[str]) -> str:
    listed = ", ".join(row.rpartition(":")[0] for row in rows[:_MOST_SHOWN])
    return f"{listed}, …" if len(rows) > _MOST_SHOWN else listed
