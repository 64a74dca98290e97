"""AIME: the 30 problems of a year, with answers from 0 to 999.

The published copies name their columns Problem/Answer, problem/answer or question/answer; those of several years say
the year in a column year, url or ID, and the others of the year in two files.
"""

import re
from collections.abc import Iterator

from tools.data.questions import Question, checked
from tools.data.rows import Row

PROBLEM = ("problem", "Problem", "question", "Question")
ANSWER = ("answer", "Answer")
SOLUTION = ("solution", "Solution")
ID = ("id", "ID", "problem_idx")
YEAR = ("year", "Year", "url", "ID")
COLUMNS = (*PROBLEM, *ANSWER, *SOLUTION, *ID, *YEAR)
NUM_PROBLEMS = 30
FOUR_DIGITS = re.compile(r"(?<!\d)(?:19|20)\d\d(?!\d)")
INTEGER = re.compile(r"0*(\d{1,3})(?:\s*(?:\^\s*\{?\\circ\}?|°))?")


def questions(rows: Iterator[Row], year: int) -> Iterator[Question]:
    """Of one year. Raises DataError for a row of another form."""
    for row in rows:
        if year_of(row) in (None, year):
            name = row.optional(*ID) or row.place
            yield checked(
                row,
                Question(f"aime_{year}", name, row.text(*PROBLEM).strip(), integer(row), row.optional(*SOLUTION)),
            )


def year_of(row: Row) -> int | None:
    """None where the row does not say."""
    said = (FOUR_DIGITS.search(row.optional(column) or "") for column in YEAR)
    return next((int(found[0]) for found in said if found), None)


def integer(row: Row) -> str:
    text = row.text(*ANSWER).strip().strip("$")
    found = INTEGER.fullmatch(text)
    if found is None:
        raise row.error(f"column {row.named(*ANSWER)!r} is {text!r}, where an integer from 0 to 999 is expected")
    return str(int(found[1]))
