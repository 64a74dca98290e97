"""The demo's questions that can be checked: sums of two three-digit numbers, worked column by column with the carries.

    347 + 585 = ?
    7+5=12; 4+8+1=13; 3+5+1=9; 932

The first line, with its line end, is the prompt and the second the response; the last number is the answer. Both splits
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
"""Sums that are drawn for both splits together; one that was drawn before is left out."""
_VALIDATION_PERCENT = 3
_FORMAT_VERSION = 1
"""Names the cached files: raise it when a row changes."""

_SCHEMA = pa.schema([("text", pa.string()), ("response", pa.string()), ("answer", pa.string())])


@dataclass(frozen=True)
class Column:
    """One column of a sum, worked from the right."""

    left: int
    right: int
    carry: int
    """Carry from the column before, 0 or 1."""

    @property
    def total(self) -> int:
        return self.left + self.right + self.carry

    @property
    def worked(self) -> str:
        carried = "+1" if self.carry else ""
        return f"{self.left}+{self.right}{carried}={self.total}"


@dataclass(frozen=True)
class Sum:
    """A question and how it is answered."""

    left: int
    right: int

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Columns from the units up, as many as the longer number has digits."""
        left, right = str(self.left)[::-1], str(self.right)[::-1]
        width = max(len(left), len(right))
        columns: list[Column] = []
        for one, other in zip(left.ljust(width, "0"), right.ljust(width, "0"), strict=True):
            carry = columns[-1].total // 10 if columns else 0
            columns.append(Column(int(one), int(other), carry))
        return tuple(columns)

    @property
    def prompt(self) -> str:
        return f"{self.left} + {self.right} = ?\n"

    @property
    def worked_prompt(self) -> str:
        """The prompt after the same sum with its response: `{prompt}{response}\\n{prompt}`."""
        return f"{self.prompt}{self.response}\n{self.prompt}"

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def response(self) -> str:
        return response_of(self.columns)


def response_of(columns: Sequence[Column]) -> str:
    """Write the columns as they are worked, and the number that their totals spell: the last one's in full, the units
    of the others.
    """
    number = "".join([str(columns[-1].total), *(str(column.total % 10) for column in columns[-2::-1])])
    return "; ".join([*(column.worked for column in columns), number])


def arrow_file(split: Split) -> Path:
    """Return the Arrow stream file of a split, rows `{text, response, answer}`; builds both splits when absent.

    Raises DataError for another split. Safe in concurrent processes: each writes under its own name, and the
    rename puts the same bytes in place.
    """
    if split not in get_args(Split):
        raise DataError(
            f"data demo:arithmetic_{split} is no demo data; use one of demo:arithmetic_train, "
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
    """Yield the sums of both splits, each once, in an order that is the same on every machine."""
    seen = set()
    for number in range(_NUM_DRAWS):
        one, other = _hash(f"draw {number}"), _hash(f"other {number}")
        drawn = Sum(OPERANDS[one % len(OPERANDS)], OPERANDS[other % len(OPERANDS)])
        if drawn not in seen:
            seen.add(drawn)
            yield drawn


def split_of(question: Sum) -> Split:
    """Choose the split by a hash of the two numbers, so that a sum and its mirror image are in one."""
    low, high = sorted((question.left, question.right))
    return "validation" if _hash(f"{low} {high}") % 100 < _VALIDATION_PERCENT else "train"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _table(rows: Sequence[Sum]) -> pa.Table:
    columns = [[row.prompt for row in rows], [row.response for row in rows], [row.answer for row in rows]]
    return pa.table(columns, schema=_SCHEMA)
