"""Which positions the rows of a buffer have, noted while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_opd.handoff.shards import Ranges, joined


@dataclass(frozen=True, slots=True)
class Written:
    """Consecutive rows of a buffer."""

    rows: range
    positions: Ranges
    """Of the sequences, one range after another in the buffer."""


class WrittenRows:
    """Collects what a context-parallel rank writes; without context parallelism every row has all positions."""

    def __init__(self, num_rows: int, width: int) -> None:
        self._whole = Written(range(num_rows), (range(width),))
        self._noted: list[Written] = []

    def note(self, start: int, num_rows: int, positions: Sequence[range] | None) -> None:
        """Rows from `start` on have these positions; None: theirs from 0 on, as many as the buffer has."""
        if positions is None:
            return
        rows, ranges = range(start, start + num_rows), joined(positions)
        if self._noted and self._noted[-1].positions == ranges and self._noted[-1].rows.stop == start:
            rows = range(self._noted.pop().rows.start, rows.stop)
        self._noted.append(Written(rows, ranges))

    def all(self) -> tuple[Written, ...]:
        return tuple(self._noted) or (self._whole,)
