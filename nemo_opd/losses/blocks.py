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
from nemo_opd.losses.term import Term, width_of

CHUNK_BYTES = 256 * 2**20
"""Budget for the temporaries of a loss, and for the logits that a head makes at once: enough rows to fill a GPU."""
CPU_CHUNK_BYTES = 64 * 2**20
"""The same on a CPU, where what is worked on should stay near its cache."""

Item = TypeVar("Item")
Units = tuple[slice, slice | Tensor]
"""Units of a term, and the places of their rows [r]."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are read together."""

    rows: Tensor
    """int64 [R] of [B·S], none of them twice."""
    steps: tuple[tuple[Units, ...], ...]
    """Taken one after another: the units of each term that fit the budget together."""
    overlaps: bool
    """Some of the rows may be in a block before it as well."""

    def units(self, term: int) -> slice:
        """All of a term's; they are consecutive."""
        return slice(self.steps[0][term][0].start, self.steps[-1][term][0].stop)


def blocks(source: LogitRows, terms: Sequence[Term]) -> Iterator[Block]:
    """Blocks that together hold each unit of every term once; those that this process of a share computes.

    A step has one unit at least and by default no more of a term than fits the budget, nor than leaves a block for each
    process of a share. A block has one step, or as many as make a product with a head worth while. Several terms wait
    for the device once each. Raises ConfigError for a chunk_size below 1.
    """
    rows, steps = _steps_of(source, terms[0]) if len(terms) == 1 else _joint_steps(source, terms)
    found = _joined(rows, steps, _rows_at_once(source, terms, len(rows)))
    nothing = tuple((slice(term.num_units, term.num_units), slice(0, 0)) for term in terms)
    yield from own_share(source, found, Block(rows[:0], (nothing,), overlaps=False))


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
    budget = _budget(source) // 4
    most = max(1, -(-num_units // source.share[1]))
    fitting = bisect_right(cells, cells[start] + budget) - 1
    return min(max(fitting, start + 1), start + most, num_units)


def rows_budget(source: LogitRows, terms: Sequence[Term]) -> int:
    """Bytes of logits that each of the sides may make at once: the student, and whoever is read ahead."""
    others = sum(term.ahead is not None and term.ahead.is_worth_while for term in terms)
    return _budget(source) // (others + source.is_product or 1)


def _budget(source: LogitRows) -> int:
    return CPU_CHUNK_BYTES if source.device.type == "cpu" else CHUNK_BYTES


def _rows_at_once(source: LogitRows, terms: Sequence[Term], num_rows: int) -> int:
    """How many rows a block should have, so that there is one for each process of a share."""
    if not source.is_product:
        return 1
    fitting = rows_budget(source, terms) // (width_of(terms) * source.dtype.itemsize)
    return min(fitting, -(-num_rows // source.share[1]))


@dataclass(frozen=True, slots=True)
class _Step:
    """What is computed at a time, as places among all rows that are needed."""

    begin: int
    end: int
    """Of its rows."""
    parts: tuple[Units, ...]
    """For each term its units and where their rows are."""


def _joined(rows: Tensor, steps: Sequence[_Step], rows_at_once: int) -> list[Block]:
    """Blocks of the consecutive steps that begin within so many rows."""
    found, start, read_to = [], 0, 0
    while start < len(steps):
        begin, end, stop = steps[start].begin, steps[start].end, start + 1
        while stop < len(steps) and steps[stop].begin < begin + rows_at_once:
            end, stop = max(end, steps[stop].end), stop + 1
        own = tuple(
            tuple((units, _shifted(places, begin)) for units, places in step.parts) for step in steps[start:stop]
        )
        found.append(Block(rows[begin:end], own, overlaps=begin < read_to))
        start, read_to = stop, max(read_to, end)
    return found


def _shifted(places: slice | Tensor, begin: int) -> slice | Tensor:
    return slice(places.start - begin, places.stop - begin) if isinstance(places, slice) else places - begin


def _steps_of(source: LogitRows, term: Term) -> tuple[Tensor, list[_Step]]:
    steps = []
    for part in unit_parts(source, term.cells, term.chunk_size):
        span = term.span(part)
        steps.append(_Step(span.start, span.stop, ((part, span),)))
    return term.rows, steps


def _joint_steps(source: LogitRows, terms: Sequence[Term]) -> tuple[Tensor, list[_Step]]:
    """A unit is of the step that its first row is in; rows that it has beyond are in the next step as well."""
    rows = torch.cat([term.rows for term in terms]).unique()
    places = [_Places.of(rows, term) for term in terms]
    steps, begin = [], 0
    while begin < len(rows):
        end = min([len(rows), *(place.end_of_part(source, begin) for place in places)])
        units = [place.units_in(begin, end) for place in places]
        last = max([end, *(place.end_of_units(part) for place, part in zip(places, units, strict=True))])
        parts = tuple((part, place.of_units(part, begin)) for place, part in zip(places, units, strict=True))
        steps.append(_Step(begin, last, parts))
        begin = end
    return rows, steps


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

    def of_units(self, units: slice, begin: int) -> slice | Tensor:
        """Of none: nothing at `begin`."""
        span = self.term.span(units)
        if span.start == span.stop:
            return slice(begin, begin)
        first, last = self.on_host[span.start], self.on_host[span.stop - 1]
        return slice(first, last + 1) if last - first == span.stop - span.start - 1 else self.on_device[span]

    def _first_unit(self, row: int) -> int:
        """The first that begins at this row or after it."""
        place = bisect_left(self.on_host, row)
        return place if self.term.begins is None else bisect_left(self.term.begins, place)
