"""Blocks of rows of logits, each read once for all terms that need some of it (methods.md §8.1)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import on_host, planned
from nemo_opd.errors import ConfigError
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import Term, width_of

CPU_BLOCK_BYTES = 64 * 2**20
"""Budget on a CPU, where what is worked on should stay near its cache."""
CPU_PRODUCT_ROWS = 128
"""Least rows of a product with a head on a CPU, 128 MiB of logits for 262,144 tokens. Each product streams the whole
head, so that a row takes 1.5 to 2.5 times as long with 32 rows and 1.1 times with 128, compared with 512.
"""
LEAST_BLOCK_BYTES = 256 * 2**20
"""Budget of any other device."""
_SHARE_OF_DEVICE = 32
"""Part of a device's memory that a budget takes. Each block reads the heads once and launches every kernel once."""
LONGEST = 4
"""Times the rows that fit the budget, within which a block looks for a row that no unit lies across."""

_Item = TypeVar("_Item")
_Units = tuple[slice, slice | Tensor]
"""Units of a term, and the places of their rows [r]."""

Step = tuple[_Units, ...]
"""Units of each term that are computed at a time."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are read together."""

    rows: Tensor
    """int64 [R] of [B·S], none of them twice."""
    steps: tuple[Step, ...]
    """Taken one after another: the units of each term that fit the budget together."""
    overlaps: bool
    """Some rows are in an earlier block as well, of this one or of those that other processes compute meanwhile."""

    def units(self, term: int) -> slice:
        """Return all units of a term; they are consecutive."""
        return slice(self.steps[0][term][0].start, self.steps[-1][term][0].stop)


def blocks(source: LogitRows, terms: Sequence[Term]) -> Iterator[Block]:
    """Yield blocks that together hold each unit of every term once; those that this process of a share computes.

    A step has one unit at least and by default no more of a term than fits the budget. A block has one step, or as many
    as make a product with a head worth while; it ends where no unit of any term goes on, so that each row is in one
    block only. Where units lie across each other for too long, it ends among them, and the rows of its last units are
    in the next block as well. Processes of a share have equally many rows, up to such a stretch, equally many blocks,
    and in each as many steps as the others in theirs: what they read together in a step they read equally often.
    Several terms wait for the device where the host does not know their rows. Raises ConfigError for a chunk_size
    below 1.
    """
    rows, places = _planned(terms)
    index, processes = source.share
    found = list(_blocks_of_all(source, rows, places, _Lengths.of(source, terms)))
    for first in range(0, len(found), processes):
        at_once = found[first : first + processes]
        own = at_once[index] if index < len(at_once) else Block(rows[:0], (_nothing_from(terms),), overlaps=False)
        source.begin([block.rows for block in at_once] + [rows[:0]] * (processes - len(at_once)))
        yield _among(own, at_once)
    source.begin(())


def unit_parts(source: LogitRows, cells: Sequence[int], chunk_size: int | None = None) -> list[slice]:
    """Cut units of one row each into consecutive slices, one a process of a share at least.

    cells, chunk_size: as of a `Term`. By default a part has the `least_rows` of a product, or more if they fit the
    budget. Raises ConfigError for a size below 1.
    """
    num_units = len(cells) - 1
    least = least_rows(source.device.type) if source.is_product and chunk_size is None else 1
    most = num_units if chunk_size is not None else -(-num_units // source.share[1])
    parts, start = [], 0
    while start < num_units:
        fitting = max(_fitting(source, cells, chunk_size, start), start + least)
        stop = min(fitting, start + most, num_units)
        parts.append(slice(start, stop))
        start = stop
    return parts


def own_share(source: LogitRows, items: Sequence[_Item], empty: _Item) -> Iterator[_Item]:
    """Yield the parts that this process of a share computes: equally many in each, with empty ones at the end."""
    index, processes = source.share
    for first in range(0, len(items), processes):
        yield items[first + index] if first + index < len(items) else empty


def block_bytes(device: str, memory: int | None = None) -> int:
    """Return the budget for the temporaries of a loss, and for the logits that a head makes at once.

    device: its type. memory: its bytes, where they are known.
    """
    return CPU_BLOCK_BYTES if device == "cpu" else max(LEAST_BLOCK_BYTES, (memory or 0) // _SHARE_OF_DEVICE)


def rows_at_once(source: LogitRows, terms: Sequence[Term]) -> int:
    """Return the rows that each product with a head makes: of the student, and of each teacher that is read ahead.

    Together they fit the budget, but there are `least_rows`.
    """
    row_bytes = width_of(terms) * source.dtype.itemsize if source.is_product else 0
    aheads = [ahead for term in terms for ahead in term.aheads if ahead.is_worth_while]
    for i, ahead in enumerate(aheads):
        if not any(ahead.is_shared_with(earlier) for earlier in aheads[:i]):
            row_bytes += ahead.row_bytes
    fitting = _budget(source) // max(row_bytes, 1)
    return max(fitting, least_rows(source.device.type))


def least_rows(device: str) -> int:
    """Return the rows that a product with a head makes at least on a type of device."""
    return CPU_PRODUCT_ROWS if device == "cpu" else 1


def _budget(source: LogitRows) -> int:
    return source.block_bytes or block_bytes(source.device.type)


def _fitting(source: LogitRows, cells: Sequence[int], chunk_size: int | None, start: int) -> int:
    """Return the end of the part of units that begins at `start`."""
    if chunk_size is not None:
        if chunk_size < 1:
            raise ConfigError(
                f"chunk_size={chunk_size}: a chunk has at least 1 row; give a larger number, or none for the default"
            )
        return min(start + chunk_size, len(cells) - 1)
    fitting = bisect_right(cells, cells[start] + _budget(source) // 4) - 1
    return max(fitting, start + 1)


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Numbers of rows of blocks."""

    at_once: int
    """Within which steps begin that are read together."""
    longest: int
    """Within which steps begin that are read together because their units lie across each other."""

    @staticmethod
    def of(source: LogitRows, terms: Sequence[Term]) -> _Lengths:
        if source.is_product:
            at_once = rows_at_once(source, terms)
            return _Lengths(at_once, LONGEST * at_once)
        return _Lengths(1, LONGEST * max(_budget(source) // (width_of(terms) * source.dtype.itemsize), 1))


def _nothing_from(terms: Sequence[Term]) -> Step:
    return tuple((slice(term.num_units, term.num_units), slice(0, 0)) for term in terms)


def _among(own: Block, at_once: Sequence[Block]) -> Block:
    """Place the block among those that the processes of a share compute at once.

    It gets empty steps at its end, of which a term computes what it does of no unit.
    """
    nothing = tuple((slice(units.stop, units.stop), slice(0, 0)) for units, _ in own.steps[-1])
    missing = max(len(block.steps) for block in at_once) - len(own.steps)
    return Block(own.rows, own.steps + (nothing,) * missing, any(block.overlaps for block in at_once))


def _blocks_of_all(source: LogitRows, rows: Tensor, places: Sequence[_Places], lengths: _Lengths) -> Iterator[Block]:
    """Yield the blocks of all processes of a share, each of which gets an equal part of the rows."""
    of_a_process, begin, read_to = -(-len(rows) // source.share[1]), 0, 0
    while begin < len(rows):
        limit = _end_of_units_across(places, min(begin + of_a_process, len(rows)), lengths.longest)
        while begin < limit:
            steps, next_begin, end = _steps_from(source, places, begin, limit, lengths)
            yield Block(rows[begin:end], tuple(steps), overlaps=begin < read_to)
            begin, read_to = next_begin, max(read_to, end)


def _steps_from(
    source: LogitRows, places: Sequence[_Places], begin: int, limit: int, lengths: _Lengths
) -> tuple[list[Step], int, int]:
    """Return the steps of a block from this row on, the first row of the next block, and the end of this one."""
    steps, start, covered = [], begin, begin
    while start < min(limit, begin + (lengths.longest if start < covered else lengths.at_once)):
        end = _end_of_step(source, places, start, limit)
        units = [place.units_in(start, end) for place in places]
        steps.append(tuple((part, place.of_units(part, begin)) for place, part in zip(places, units, strict=True)))
        covered = max([covered, end, *(place.end_of_units(part) for place, part in zip(places, units, strict=True))])
        start = end
    return steps, min(place.begin_of_unit_from(start) for place in places), covered


def _end_of_step(source: LogitRows, places: Sequence[_Places], begin: int, limit: int) -> int:
    """Return the end of the step that begins at this row, if possible between units."""
    end = min([limit, *(place.end_of_part(source, begin) for place in places)])
    whole = _begin_of_units_across(places, end, begin)
    return whole if whole > begin else end


def _begin_of_units_across(places: Sequence[_Places], row: int, first: int) -> int:
    """Return the last row up to this one that no unit lies across, looked for after `first` only."""
    while row > first and (begin := min(place.begin_of_unit_across(row) for place in places)) < row:
        row = begin
    return row


def _end_of_units_across(places: Sequence[_Places], row: int, within: int) -> int:
    """Return the first row from this one on that no unit lies across; the row itself if none is within the limit."""
    end = row
    while (further := max(place.end_of_unit_across(end) for place in places)) > end:
        if further - row > within:
            return row
        end = further
    return end


def _planned(terms: Sequence[Term]) -> tuple[Tensor, list[_Places]]:
    """Return the rows that the terms need, int64 [R], and the places of each term's among them."""
    if len(terms) == 1:
        (term,) = terms
        return term.rows, [_Places(term, len(term.rows), term.rows, range(len(term.rows)))]

    def joined(*by_term: Tensor) -> list[Tensor]:
        rows = torch.cat(by_term).unique()
        return [rows, *(torch.searchsorted(rows, own) for own in by_term)]

    rows, *places = planned(joined, *(term.rows for term in terms))
    on_device = zip(terms, places, strict=True)
    return rows, [_Places(term, len(rows), own, _listed(own)) for term, own in on_device]


def _listed(indices: Tensor) -> list[int]:
    known = on_host(indices)
    found: list[int] = (indices if known is None else known).tolist()
    return found


@dataclass(frozen=True, slots=True)
class _Places:
    """Places of a term's rows among those that all terms need."""

    term: Term
    num_rows: int
    """Number of rows of all terms."""
    on_device: Tensor
    """int64 [R]"""
    on_host: Sequence[int]

    def end_of_part(self, source: LogitRows, begin: int) -> int:
        """Return the end of a step that begins at this row and holds no more of the term than allowed."""
        start = self._first_unit(begin)
        stop = start if start == self.term.num_units else _fitting(source, self.term.cells, self.term.chunk_size, start)
        return self.num_rows if stop == self.term.num_units else self._rows_of(stop).start

    def units_in(self, begin: int, end: int) -> slice:
        return slice(self._first_unit(begin), self._first_unit(end))

    def end_of_units(self, units: slice) -> int:
        return self._rows_of(units.stop - 1).stop if units.stop > units.start else 0

    def begin_of_unit_from(self, row: int) -> int:
        """Return the first row from this one on at which a unit begins; after the last if none does."""
        unit = self._first_unit(row)
        return self.num_rows if unit == self.term.num_units else self._rows_of(unit).start

    def begin_of_unit_across(self, row: int) -> int:
        """Return the first row of the unit that lies across this row; the row itself if there is none."""
        return self._across(row).start

    def end_of_unit_across(self, row: int) -> int:
        return self._across(row).stop

    def of_units(self, units: slice, begin: int) -> slice | Tensor:
        """Return the rows of units as places in a block that begins at this row; nothing for no units."""
        span = self.term.span(units)
        if span.start == span.stop:
            return slice(0, 0)
        first, last = self.on_host[span.start], self.on_host[span.stop - 1]
        if last - first == span.stop - span.start - 1:
            return slice(first - begin, last + 1 - begin)
        return self.on_device[span] - begin

    def _across(self, row: int) -> slice:
        unit = self._first_unit(row) - 1
        rows = self._rows_of(unit) if unit >= 0 else slice(row, row)
        return rows if rows.stop > row else slice(row, row)

    def _rows_of(self, unit: int) -> slice:
        """Return the rows of a unit, from its first to its last."""
        span = self.term.span(slice(unit, unit + 1))
        return slice(self.on_host[span.start], self.on_host[span.stop - 1] + 1)

    def _first_unit(self, row: int) -> int:
        """Return the first unit that begins at this row or after it."""
        place = bisect_left(self.on_host, row)
        return place if self.term.begins is None else bisect_left(self.term.begins, place)
