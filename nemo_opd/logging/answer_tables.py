"""Tables of questions: accuracy by how difficult they were at the start or by what a column says of them, and answers
that have changed since.
"""

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
"""Rows of questions, and levels, that are listed."""
_OTHERS = "others"
_Values = Mapping[str, float]
"""Share of right answers by question."""


def answer_tables(values: Sequence[QuestionValues]) -> list[TextTable]:
    """Return the tables of each set whose student has answered twice."""
    tables: list[TextTable] = []
    for name in dict.fromkeys(each.set for each in values):
        own = [each for each in values if each.set == name]
        measures = dict.fromkeys(measure for each in own for measure in each.values)
        shares = [measure for measure in measures if is_share(measure) and not is_mean(measure)]
        by_samples = next((measure for measure in shares if measure == "pass@1"), next(iter(shares), None))
        by_answer = "greedy" if "greedy" in shares else by_samples
        if by_samples is None:
            continue
        found = _by_difficulty(name, by_samples, own), _by_level(name, by_samples, own), _changed(name, by_answer, own)
        tables += [table for table in found if table is not None]
    return tables


def _answers(measure: str, values: Sequence[QuestionValues], teacher: str | None) -> list[tuple[int, _Values]]:
    """Return step and values of each evaluation of a model that has values between 0 and 1."""
    found = [
        (each.step, dict(zip(each.questions, each.values[measure], strict=True)))
        for each in values
        if each.teacher == teacher and measure in each.values
    ]
    return [(step, own) for step, own in found if all(0 <= value <= 1 for value in own.values())]


def _by_difficulty(name: str, measure: str, values: Sequence[QuestionValues]) -> TextTable | None:
    """Return means of questions that were right in the same share of samples when the student was asked first."""
    (_, before), *_ = _answers(measure, values, None) or [(0, {})]
    groups = {label: [row for row, each in before.items() if _level(each) == i] for i, label in enumerate(_LEVELS)}
    return _means(f"{_title(name, measure)} by difficulty", groups, measure, values)


def _by_level(name: str, measure: str, values: Sequence[QuestionValues]) -> TextTable | None:
    """Return means of questions of which a column says the same; the most frequent, then the others together."""
    level_of = {row: level for each in values for row, level in zip(each.questions, each.levels, strict=False)}
    frequent = [level for level, _ in Counter(level_of.values()).most_common(_MOST_SHOWN)]
    groups: dict[str, list[str]] = {level: [] for level in sorted(frequent, key=_in_order)}
    for row, level in level_of.items():
        groups.setdefault(level if level in frequent else _OTHERS, []).append(row)
    return _means(f"{_title(name, measure)} by level", groups, measure, values)


def _in_order(level: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers within texts by their value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", level)]


def _means(
    title: str, groups: Mapping[str, Sequence[str]], measure: str, values: Sequence[QuestionValues]
) -> TextTable | None:
    """Return the means of groups of questions, of the student before and after and of its teachers."""
    student = _answers(measure, values, None)
    if len(student) < 2 or not any(groups.values()):
        return None
    (_, before), (last, after) = student[0], student[-1]
    names = dict.fromkeys(each.teacher for each in values if each.teacher is not None)
    teachers = {teacher: own[-1][1] for teacher in names if (own := _answers(measure, values, teacher))}
    rows = [
        [label, f"{len(rows):,}", *(_mean(rows, model) for model in (before, after, *teachers.values()))]
        for label, rows in groups.items()
        if rows
    ]
    heads = ["", "questions", "before", f"after step {last:,}", *(f"teacher {teacher}" for teacher in teachers)]
    return TextTable(title, heads, rows)


def _level(value: float) -> int:
    if value in (0, 1):
        return 0 if value == 0 else len(_LEVELS) - 1
    return 1 + (value > 1 / 3 + 1e-9) + (value > 2 / 3 + 1e-9)


def _mean(questions: Sequence[str], values: _Values) -> str:
    known = [values[row] for row in questions if row in values]
    return share(fmean(known)) if known else NOTHING


def _changed(name: str, measure: str | None, values: Sequence[QuestionValues]) -> TextTable | None:
    """Return questions by whether they were answered rightly first and last; right: in at least half of the samples."""
    student = [own for _, own in _answers(measure, values, None)] if measure else []
    if len(student) < 2:
        return None
    right = {row: [own[row] >= 0.5 for own in student] for row in student[0] if all(row in own for own in student)}
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
        [kind, f"{len(found):,}", "" if kind.endswith("throughout") else _listed(found)]
        for kind, found in kinds.items()
        if found
    ]
    rows.append(["changes from one evaluation to the next", f"{changes:,}", ""])
    return TextTable(f"{_title(name, measure or '')}: answers that changed", ["", "questions", "rows"], rows)


def _title(name: str, measure: str) -> str:
    return f"Questions{f' of {name}' * bool(name)}, {measure}"


def _listed(rows: Sequence[str]) -> str:
    shown = ", ".join(row.rpartition(":")[0] for row in rows[:_MOST_SHOWN])
    return f"{shown}, …" if len(rows) > _MOST_SHOWN else shown
