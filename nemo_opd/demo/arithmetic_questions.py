"""The demo's questions with checkable answers, and its benchmark."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from nemo_opd.demo import python_sources
from nemo_opd.demo.python_sources import Split, write_stream
from nemo_opd.errors import DataError
from nemo_opd.files import write_atomically
from nemo_opd.paths import cache_dir

OPERANDS = range(100, 1_000)
_NUM_DRAWS = 20_000
"""Sums drawn for both splits together, with duplicates that are then dropped."""
_VALIDATION_PERCENT = 3
_FORMAT_VERSION = 1
"""Part of the cache folder's name: increase it when a row changes."""

_SCHEMA = pa.schema([("text", pa.string()), ("response", pa.string()), ("answer", pa.string())])

_TASK_NAME = "next_line"
_NUM_QUESTIONS = 64
_NUM_CHOICES = 4
_CONTEXT_CHARS, _LINE_CHARS = 160, range(24, 64)

_TASK_YAML = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
target_delimiter: ""
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""


@dataclass(frozen=True)
class Column:
    """One column of a sum, computed from the right."""

    left: int
    right: int
    carry: int
    """Carry from the previous column, 0 or 1."""

    @property
    def total(self) -> int:
        return self.left + self.right + self.carry

    @property
    def worked(self) -> str:
        carried = "+1" if self.carry else ""
        return f"{self.left}+{self.right}{carried}={self.total}"


@dataclass(frozen=True)
class Sum:
    """A sum, with its question and answer."""

    left: int
    right: int

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Columns from the units up, as many as the digits of the longer number."""
        left, right = str(self.left)[::-1], str(self.right)[::-1]
        width = max(len(left), len(right))
        columns: list[Column] = []
        for left_digit, right_digit in zip(left.ljust(width, "0"), right.ljust(width, "0"), strict=True):
            carry = columns[-1].total // 10 if columns else 0
            columns.append(Column(int(left_digit), int(right_digit), carry))
        return tuple(columns)

    @property
    def prompt(self) -> str:
        return f"{self.left} + {self.right} = ?\n"

    @property
    def worked_prompt(self) -> str:
        """The prompt, preceded by the same sum with its response: `{prompt}{response}\\n{prompt}`."""
        return f"{self.prompt}{self.response}\n{self.prompt}"

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def response(self) -> str:
        return response_of(self.columns)


def response_of(columns: Sequence[Column]) -> str:
    """Format worked columns and the number that they give: the last column's total, then the units of earlier ones."""
    number = "".join([str(columns[-1].total), *(str(column.total % 10) for column in columns[-2::-1])])
    return "; ".join([*(column.worked for column in columns), number])


def arrow_file(split: Split) -> Path:
    """Return the Arrow stream file of a split, with rows `{text, response, answer}`; build both splits if absent.

    Raises DataError if the split does not exist. Safe in concurrent processes: each writes under its own name, and
    renames the same bytes into place.
    """
    if split not in get_args(Split):
        raise DataError(
            f"data demo:arithmetic_{split} is not demo data; choose from demo:arithmetic_train, "
            "demo:arithmetic_validation"
        )
    folder = cache_dir("demo", f"arithmetic-{_FORMAT_VERSION}")
    path = folder / f"{split}.arrow"
    if not path.exists():
        drawn = list(sums())
        for name in get_args(Split):
            write_stream(folder / f"{name}.arrow", _table([s for s in drawn if split_of(s) == name]))
    return path


def sums() -> Iterator[Sum]:
    """Yield the sums of both splits without duplicates, in the same order on every machine."""
    seen = set()
    for number in range(_NUM_DRAWS):
        left, right = _hash(f"draw {number}"), _hash(f"other {number}")
        drawn = Sum(OPERANDS[left % len(OPERANDS)], OPERANDS[right % len(OPERANDS)])
        if drawn not in seen:
            seen.add(drawn)
            yield drawn


def split_of(question: Sum) -> Split:
    """Choose the split by a hash of the two numbers in ascending order, so that a + b and b + a share a split."""
    low, high = sorted((question.left, question.right))
    return "validation" if _hash(f"{low} {high}") % 100 < _VALIDATION_PERCENT else "train"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _table(rows: Sequence[Sum]) -> pa.Table:
    columns = [[row.prompt for row in rows], [row.response for row in rows], [row.answer for row in rows]]
    return pa.table(columns, schema=_SCHEMA)


def task_folder() -> Path:
    """Return the benchmark's folder; build it if absent. Processes can share it.

    Raises DataError as `python_sources.arrow_file` does.
    """
    source = python_sources.arrow_file("validation")
    name = hashlib.sha256(f"1 {_NUM_QUESTIONS} {source.parent.name}".encode()).hexdigest()[:12]
    folder = source.parent / f"tasks-{name}"
    if not (folder / f"{_TASK_NAME}.yaml").exists():
        with pa.memory_map(str(source)) as file:
            texts = pa.ipc.open_stream(file).read_all().column("text").to_pylist()
        write_task(folder, _TASK_NAME, _questions(texts))
    return folder


def write_task(folder: Path, task: str, questions: Iterable[Mapping[str, Any]]) -> None:
    """Write a multiple-choice task of questions with `context`, `choices` and `answer`, the index of the right one."""
    rows, path = [json.dumps(question) for question in questions], folder / f"{task}.json"
    write_atomically(path, ("\n".join(rows) + "\n").encode())
    text = _TASK_YAML.format(task=task, questions=json.dumps(str(path.resolve())))
    write_atomically(folder / f"{task}.yaml", text.encode())


def _questions(texts: list[str]) -> Iterator[dict[str, object]]:
    """Yield passages, with the line that follows each hidden among lines of other passages."""
    generator = random.Random(0)
    passages = [passage for passage in map(_split, texts) if passage is not None][: _NUM_QUESTIONS * _NUM_CHOICES]
    for context, line in passages[:_NUM_QUESTIONS]:
        wrong = generator.sample([choice for _, choice in passages if choice != line], _NUM_CHOICES - 1)
        answer = generator.randrange(_NUM_CHOICES)
        yield {"context": context, "choices": [*wrong[:answer], line, *wrong[answer:]], "answer": answer}


def _split(text: str) -> tuple[str, str] | None:
    """Return the end of the text before a line in its middle, and that line; None if it is too short or too long."""
    middle = len(text) // 2
    line_end, _, following = text[middle:].partition("\n")
    line, has_more, _ = following.partition("\n")
    context = text[:middle] + line_end + "\n"
    fits = has_more and len(line.strip()) in _LINE_CHARS
    return (context[-_CONTEXT_CHARS:], line) if fits else None
