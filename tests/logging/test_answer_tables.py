"""Accuracy by difficulty and changed answers: the right questions in the right rows."""

from dataclasses import replace

from nemo_opd.logging.scores import QuestionValues, answer_tables

ROWS = ("3:a", "5:b", "8:a", "13:c")


def values(step: int, teacher: str | None, pass_1: list[float], greedy: list[float]) -> QuestionValues:
    shares = {"pass@1": tuple(pass_1), "mean@4": (9.0,) * 4, "greedy": tuple(greedy)}
    return QuestionValues(step, "sums", teacher, ROWS, shares)


START = values(0, None, [0.0, 1 / 3, 1.0, 0.75], [0.0, 0.0, 1.0, 1.0])
TEACHER = values(0, "big", [1.0, 1.0, 1.0, 0.5], [1.0] * 4)
MIDDLE = values(5, None, [0.5, 0.5, 0.5, 0.5], [1.0, 0.0, 0.0, 1.0])
END = values(9, None, [0.25, 0.75, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0])


def test_difficulty_is_that_at_the_start() -> None:
    """Bugs: levels by the last evaluation; exactly a third on the wrong side; a teacher's answers as the student's."""
    difficulty, _ = answer_tables([START, TEACHER, MIDDLE, END])
    assert difficulty.title == "Questions of sums, pass@1 by difficulty"
    assert list(difficulty.heads) == ["", "questions", "before", "after step 9", "teacher big"]
    assert [list(row) for row in difficulty.rows] == [
        ["never right at the start", "1", "0.0 %", "25.0 %", "100.0 %"],
        ["up to a third", "1", "33.3 %", "75.0 %", "100.0 %"],
        ["more than two thirds", "1", "75.0 %", "0.0 %", "50.0 %"],
        ["always right", "1", "100.0 %", "100.0 %", "100.0 %"],
    ]


def test_a_column_says_how_difficult_questions_are() -> None:
    """Bugs: levels have questions of one evaluation only; levels are sorted as texts."""
    levels = ("level 10", "level 2", "level 2", "level 1")
    tables = answer_tables([replace(values, levels=levels) for values in (START, TEACHER, END)])
    assert [table.title.rpartition(",")[2] for table in tables][:2] == [" pass@1 by difficulty", " pass@1 by level"]
    assert [list(row) for row in tables[1].rows] == [
        ["level 1", "1", "75.0 %", "0.0 %", "50.0 %"],
        ["level 2", "2", "66.7 %", "87.5 %", "100.0 %"],
        ["level 10", "1", "0.0 %", "25.0 %", "100.0 %"],
    ]


def test_many_levels_are_told_together() -> None:
    rows = tuple(f"{i}:x" for i in range(31))
    evaluations = [
        QuestionValues(step, "", None, rows, {"pass@1": (1.0,) * 31}, levels=(*map(str, range(30)), "7"))
        for step in (0, 1)
    ]
    by_level = answer_tables(evaluations)[1]
    assert [row[1] for row in by_level.rows if row[0] in ("7", "others")] == ["2", "10"]


def test_changes_are_between_evaluations_of_the_student() -> None:
    _, changed = answer_tables([START, TEACHER, MIDDLE, END])
    assert changed.title == "Questions of sums, greedy: answers that changed"
    assert [list(row) for row in changed.rows] == [
        ["wrong, now right", "1", "5"],
        ["right, now wrong", "1", "13"],
        ["right in between, wrong again", "1", "3"],
        ["wrong in between, right again", "1", "8"],
        ["changes from one evaluation to the next", "6", ""],
    ]


def test_one_evaluation_changes_nothing() -> None:
    assert answer_tables([START, TEACHER]) == []
    assert answer_tables([QuestionValues(step, "", None, ("0",), {"mean@1": (2.0,)}) for step in (0, 1)]) == []
