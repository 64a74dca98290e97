"""How rows of logits are cut into blocks, each read once for all terms that need some of it (METHODS §8)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.losses.logit_rows import LogitRows
from nemo_opd.losses.term import Term

CHUNK_BYTES = 256 * 2**20
"""Budget for the temporaries of a block: enough rows to fill a GPU."""
CPU_CHUNK_BYTES = 64 * 2**20
"""The same on a CPU, where a block should stay near its cache."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are read together."""

    rows: Tensor
    """int64 [R] of [B·S], none of them twice."""
    parts: tuple[tuple[slice, Tensor | None], ...]
    """For each term its units, and which of the rows [r] are theirs; None: all, in this order."""
    overlaps: bool
    """Some of the rows may be in a block before it as well."""


def blocks(source: LogitRows, terms: Sequence[Term]) -> Iterator[Block]:
    """Blocks that together hold each unit of every term once; those that this process of a share computes.

    Each has one unit at least and by default no more of a term than fits the budget, nor than leaves a block for each
    process of a share. Several terms wait for the device once each. Raises ConfigError for a chunk_size below 1.
    """
    found = _blocks_of(source, terms[0]) if len(terms) == 1 else _joint_blocks(source, terms)
    nothing = tuple((slice(term.num_units, term.num_units), None) for term in terms)
    yield from own_share(source, found, Block(terms[0].rows[:0], nothing, overlaps=False))


def unit_parts(source: LogitRows, cells: Sequence[int], chunk_size: int | None = None) -> list[slice]:
    """Consecutive slices of units; `cells` and `chunk_size` as of a `Term`. Raises ConfigError for a size below 1."""
    parts, start = [], 0
    while start < len(cells) - 1:
        stop = _fitting(source, cells, chunk_size, start)
        parts.append(slice(start, stop))
        start = stop
    return parts


def own_share(source: LogitRows, items: Sequence[Item], empty: Item) -> Iterator[Item]:
    """Those that this process of a share computes: equally many in each, with empty ones at the end."""
    index, processes = source.share
    for first in range(0, len(items), processes):
        yield items[first + index] if first + index < len(items) else empty


def _fitting(source: LogitRows, cells: Sequence[int], chunk_size: int | None, start: int) -> int:
    """Where a part that begins with unit `start` ends."""
    num_units = len(cells) - 1
    if chunk_size is not None:
        if chunk_size < 1:
            raise ConfigError(
                f"chunk_size={chunk_size}: a chunk has at least 1 row; give a larger number, or none for the default"
            )
        return min(start + chunk_size, num_units)
    budget = (CPU_CHUNK_BYTES if source.device.type == "cpu" else CHUNK_BYTES) // 4
    most = max(1, -(-num_units // source.share[1]))
    fitting = bisect_right(cells, cells[start] + budget) - 1
    return min(max(fitting, start + 1), start + most, num_units)


def _blocks_of(source: LogitRows, term: Term) -> list[Block]:
    parts = unit_parts(source, term.cells, term.chunk_size)
    return [Block(term.rows[term.span(part)], ((part, None),), overlaps=False) for part in parts]


def _joint_blocks(source: LogitRows, terms: Sequence[Term]) -> list[Block]:
    """A unit is of the block that its first row is in; rows that it has beyond are read again by the next block."""
    rows = torch.cat([term.rows for term in terms]).unique()
    places = [_Places.of(rows, term) for term in terms]
    found, begin, read_to = [], 0, 0
    while begin < len(rows):
        end = min([len(rows), *(place.end_of_part(source, begin) for place in places)])
        units = [place.units_in(begin, end) for place in places]
        last = max([end, *(place.end_of_units(part) for place, part in zip(places, units, strict=True))])
        parts = tuple((part, place.index(part, begin, last)) for place, part in zip(places, units, strict=True))
        found.append(Block(rows[begin:last], parts, overlaps=begin < read_to))
        begin, read_to = end, max(read_to, last)
    return found


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows of a term are among those that all terms need."""

    term: Term
    num_rows: int
    """Of all terms."""
    on_device: Tensor
    """int64 [R]"""
    on_host: list[int]

    @staticmethod
    def of(rows: Tensor, term: Term) -> _Places:
        places = torch.searchsorted(rows, term.rows)
        return _Places(term, len(rows), places, places.tolist())

    def end_of_part(self, source: LogitRows, begin: int) -> int:
        """Before which row a block ends that begins at this one and holds no more of the term than may be."""
        start = self._first_unit(begin)
        stop = start if start == self.term.num_units else _fitting(source, self.term.cells, self.term.chunk_size, start)
        if stop == self.term.num_units:
            return self.num_rows
        return self.on_host[self.term.span(slice(stop, stop)).start]

    def units_in(self, begin: int, end: int) -> slice:
        return slice(self._first_unit(begin), self._first_unit(end))

    def end_of_units(self, units: slice) -> int:
        return 1 + self.on_host[self.term.span(units).stop - 1] if units.stop > units.start else 0

    def index(self, units: slice, begin: int, end: int) -> Tensor | None:
        """Which of a block's rows are of these units."""
        span = self.term.span(units)
        return None if span.stop - span.start == end - begin else self.on_device[span] - begin

    def _first_unit(self, row: int) -> int:
        """The first that begins at this row or after it."""
        place = bisect_left(self.on_host, row)
        return place if self.term.begins is None else bisect_left(self.term.begins, place)
