"""The demo's questions with checkable answers: sums of two three-digit numbers, column by column with carries.

    347 + 585 = ?
    7+5=12; 4+8+1=13; 3+5+1=9; 932

The first line, with its newline, is the prompt and the second the response; the last number is the answer. Both splits
are Arrow files, built on first use.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import get_args

import pyarrow as pa

from nemo_opd.demo.arrow import write_stream
from nemo_opd.demo.corpus import Split
from nemo_opd.errors import DataError
from nemo_opd.paths import cache_dir

OPERANDS = range(100, 1_000)
_NUM_DRAWS = 20_000
"""Sums drawn for both splits together, with duplicates that are then dropped."""
_VALIDATION_PERCENT = 3
_FORMAT_VERSION = 1
"""Part of the cache folder's name: increase it when a row changes."""

_SCHEMA = pa.schema([("text", pa.string()), ("response", pa.string()), ("answer", pa.string())])


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
