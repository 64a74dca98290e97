"""evaluation.jsonl: a value for each question and measure, of the student at each evaluation and of its teachers."""

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
    """Values of which a model's figures for a set are the means."""

    step: int
    """Optimizer steps that the student had taken."""
    set: str
    """Name of the set; empty for the one without a name."""
    teacher: str | None
    """Name of the teacher that answered; None for the student."""
    questions: tuple[str, ...]
    """Place and content of each question, in brief: equal where the same question was asked."""
    values: Mapping[str, tuple[float, ...]]
    """Values by measure, such as `pass@1`, in the order of the questions."""
    lower_is_better: tuple[str, ...] = ()
    """Measures that are better the lower they are."""
    levels: tuple[str, ...] = ()
    """Difficulty or kind of each question, in their order; none where no column says it."""


_VALUES = TypeAdapter(QuestionValues)


class ValueLog:
    """Appends to evaluation.jsonl, which appears with the first line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def truncate_after(self, step: int) -> None:
        """Drop lines after `step` (all where it is 0, for step 0 is evaluated again) and a torn last one.

        Raises DataError where the file is damaged.
        """
        if self.path.exists():
            kept = (each for each in read_values(self.path) if step and each.step <= step)
            write_atomically(self.path, "".join(map(_line, kept)).encode())

    def write(self, values: QuestionValues) -> None:
        """Append a line. Raises StorageError where the file does not take it."""
        with storage_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(values))


def _line(values: QuestionValues) -> str:
    return json.dumps(asdict(values), allow_nan=False) + "\n"


def read_values(path: Path) -> list[QuestionValues]:
    """Return the lines in the order written; none where there is no file. Raises DataError for a damaged one."""
    if not path.exists():
        return []
    lines: Iterable[QuestionValues | None] = parse_lines(path, path.read_bytes().split(b"\n"), _parse, "no values")
    return [each for each in lines if each is not None]


def _parse(line: bytes) -> QuestionValues | None:
    return _VALUES.validate_json(line) if line else None
