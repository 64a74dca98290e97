"""MATH-500: problems of five levels with answers in LaTeX.

Columns: problem, solution, answer, subject, level, unique_id.
"""

from collections.abc import Iterator

from tools.data.questions import Question, checked
from tools.data.rows import Row

COLUMNS = ("problem", "solution", "answer", "subject", "level", "unique_id")


def questions(rows: Iterator[Row]) -> Iterator[Question]:
    """Raises DataError for a row of another form."""
    for row in rows:
        question = Question(
            "math_500",
            row.optional("unique_id") or row.place,
            row.text("problem").strip(),
            row.text("answer").strip(),
            row.optional("solution"),
            row.optional("subject"),
            row.optional("level"),
        )
        yield checked(row, question)
