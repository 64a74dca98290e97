"""evaluation.jsonl: a value per question and measure, for the student at each evaluation and for its teachers."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from nemo_opd.disk import storage_errors
from nemo_opd.files import write_atomically
from nemo_opd.logging.jsonl import parse_lines


@dataclass(frozen=True, slots=True)
class QuestionValues:
    """Values per question, whose means are a model's figures for a set."""

    step: int
    """Optimizer steps that the student had taken."""
    set: str
    """Name of the set; empty for the unnamed one."""
    teacher: str | None
    """Name of the teacher that answered, or None for the student."""
    questions: tuple[str, ...]
    """Row and a digest of each question: equal if the same question was asked."""
    values: Mapping[str, tuple[float, ...]]
    """Values by measure, such as `pass@1`, in the order of the questions."""
    lower_is_better: tuple[str, ...] = ()
    """Measures with lower values for better answers."""
    levels: tuple[str, ...] = ()
    """Difficulty or kind of each question, in order; empty without a level column."""


_VALUES = TypeAdapter(QuestionValues)


class ValueLog:
    """Appends to evaluation.jsonl, which is created with the first line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def truncate_after(self, step: int) -> None:
        """Drop lines after `step` (all if it is 0, as step 0 is evaluated again) and a torn last one.

        Raises DataError if the file is damaged.
        """
        if self.path.exists():
            valid = (values for values in read_values(self.path) if step and values.step <= step)
            write_atomically(self.path, "".join(map(_line, valid)).encode())

    def write(self, values: QuestionValues) -> None:
        """Append a line. Raises StorageError if the file cannot be written."""
        with storage_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(values))


def _line(values: QuestionValues) -> str:
    return json.dumps(asdict(values), allow_nan=False) + "\n"


def read_values(path: Path) -> list[QuestionValues]:
    """Return the lines in the order written; empty without a file. Raises DataError if it is damaged."""
    if not path.exists():
        return []
    lines: Iterable[QuestionValues | None] = parse_lines(
        path, path.read_bytes().split(b"\n"), _parse, "not question values"
    )
    return [values for values in lines if values is not None]


def _parse(line: bytes) -> QuestionValues | None:
    return _VALUES.validate_json(line) if line else None
