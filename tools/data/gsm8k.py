"""GSM8K: word problems. Columns: question, and answer, which is a worked solution whose last line is `#### 42`."""

import re
from collections.abc import Iterator

from tools.data.questions import Question, checked
from tools.data.rows import Row

COLUMNS = ("question", "answer")
LAST_LINE = re.compile(r"^####\s*(-?[\d,]*\.?\d+)\s*\Z", re.MULTILINE)
CALCULATION = re.compile(r"<<[^<>]*>>")
"""Notes for a calculator inside the solutions."""


def questions(rows: Iterator[Row]) -> Iterator[Question]:
    """Raises DataError for a row of another form."""
    for row in rows:
        worked = row.text("answer")
        found = LAST_LINE.search(worked)
        if found is None:
            raise row.error("column 'answer' does not end with a line `#### NUMBER`")
        solution = CALCULATION.sub("", worked[: found.start()]).strip()
        answer = found[1].replace(",", "")
        yield checked(row, Question("gsm8k", row.place, row.text("question").strip(), answer, solution))
