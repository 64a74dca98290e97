"""Blocks of rows of logits, each read once for all terms that need any of its rows (methods.md §8.1)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host, to_list
from nemo_opd.errors import ConfigError
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import Term, width_of

CPU_BLOCK_BYTES = 64 * 2**20
"""Budget on a CPU: small, to keep the working set near its cache."""
CPU_PRODUCT_ROWS = 128
"""Minimum rows of a product with a head on a CPU: 128 MiB of logits for 262,144 tokens. Each product streams the whole
head: compared with 512 rows, a row takes 1.5 to 2.5 times as long with 32 and 1.1 times with 128.
"""
LEAST_BLOCK_BYTES = 256 * 2**20
"""Minimum budget on any other device."""
_MEMORY_DIVISOR = 32
"""A budget is a device's memory divided by this. Each block reads the heads once and launches every kernel once. On an
H100 that a 1B student and two teachers share, half the divisor takes the room that the processes' caches need, which
costs about 50 ms a step.
"""
LONGEST = 4
"""Maximum length of a block that grows to find a row that no unit spans, in multiples of the rows within budget."""

_Units = tuple[slice, slice | Tensor]
"""Units of a term, and the positions of their rows [r] in the block."""

Step = tuple[_Units, ...]
"""Units of each term that are computed together."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are read together."""

    rows: Tensor
    """int64 [R], unique indices into [B·S]."""
    steps: tuple[Step, ...]
    """Computed one after another: the units of each term that fit the budget together."""
    overlaps: bool
    """Some rows were also in an earlier block, or are also in a concurrent block of another process."""

    def units(self, term: int) -> slice:
        """Return all units of a term; they are consecutive."""
        return slice(self.steps[0][term][0].start, self.steps[-1][term][0].stop)


def blocks(source: LogitRows, terms: Sequence[Term], in_kernels: Container[int] = ()) -> Iterator[Block]:
    """Yield this process's blocks; over the processes of a share, they contain each unit of every term once.

    A step has at least one unit, and by default no more units of a term than fit the budget. A block has one step, or
    as many as make a product with a head efficient; it ends at a row that no unit spans, so that each row is in one
    block only. If units overlap for too long a stretch, the block ends inside it, and the rows of its last units are
    also in the next block. The processes of a share get equally many rows (up to such a stretch), the same number of
    blocks, and the same number of steps in concurrent blocks, since they read shared sources collectively. With several
    terms, the host waits for the device if it does not know their rows. Raises ConfigError for a chunk_size below 1.

    in_kernels: indices of terms that kernels compute, a row at a time: only what they read limits their steps.
    """
    rows, placed_terms = _joined_rows(terms)
    most_rows = _kernel_rows(source, terms)
    placed_terms = [
        replace(placed, most_rows=most_rows) if i in in_kernels and placed.term.chunk_size is None else placed
        for i, placed in enumerate(placed_terms)
    ]
    index, processes = source.share
    at_end = tuple((slice(term.num_units, term.num_units), slice(0, 0)) for term in terms)
    all_blocks = list(_all_blocks(source, rows, placed_terms, *_lengths(source, terms)))
    for first in range(0, len(all_blocks), processes):
        concurrent = all_blocks[first : first + processes]
        local = concurrent[index] if index < len(concurrent) else Block(rows[:0], (at_end,), overlaps=False)
        source.begin([block.rows for block in concurrent] + [rows[:0]] * (processes - len(concurrent)))
        yield _matched(local, concurrent)
    source.begin(())


def local_parts(source: LogitRows, cells: Sequence[int]) -> list[slice]:
    """Cut units of one row each into consecutive slices, and return the slices of this process.

    A slice has as many units as fit the budget, at least the `least_rows` of a product and at most ⌈units / processes⌉.
    Each process of a share gets equally many slices, the last of which may be empty. cells: as in `Term`.
    """
    num_units, (index, processes) = len(cells) - 1, source.share
    least, most = least_rows(source.device.type) if source.is_product else 1, -(-num_units // processes)
    bounds = [0]
    while bounds[-1] < num_units:
        fitting = max(_end_of_part(source, cells, None, bounds[-1]), bounds[-1] + least)
        bounds.append(min(fitting, bounds[-1] + most, num_units))
    parts = [slice(start, stop) for start, stop in pairwise(bounds)]
    return (parts + [slice(0, 0)] * (-len(parts) % processes))[index::processes]


def block_bytes(device: str, memory: int | None = None) -> int:
    """Return the budget for a loss's temporaries, and for the logits that one product with a head makes.

    device: device type. memory: its size in bytes, if known.
    """
    return CPU_BLOCK_BYTES if device == "cpu" else max(LEAST_BLOCK_BYTES, (memory or 0) // _MEMORY_DIVISOR)


def rows_at_once(source: LogitRows, terms: Sequence[Term]) -> int:
    """Return the rows of each product with a head: the student's, and each teacher's that is read ahead.

    Together they fit the budget, but there are at least `least_rows`.
    """
    row_bytes = width_of(terms) * source.dtype.itemsize if source.is_product else 0
    aheads = [ahead for term in terms for ahead in term.aheads if ahead.is_worth_while]
    for i, ahead in enumerate(aheads):
        if not any(ahead.is_shared_with(earlier) for earlier in aheads[:i]):
            row_bytes += ahead.row_bytes
    fitting = _budget(source) // max(row_bytes, 1)
    return max(fitting, least_rows(source.device.type))


def _kernel_rows(source: LogitRows, terms: Sequence[Term]) -> int:
    """Return the rows of a step of terms that kernels compute, which need no temporaries of a row's size.

    The budget must hold what `rows_at_once` does not count: a copy of given logits with their fp32 gradient, and rows
    that a step reads for itself.
    """
    row_bytes = 0 if source.is_product else width_of(terms) * (source.dtype.itemsize + torch.float32.itemsize)
    row_bytes += sum(ahead.row_bytes for term in terms for ahead in term.aheads if not ahead.is_worth_while)
    return min(rows_at_once(source, terms), max(_budget(source) // max(row_bytes, 1), 1))


def least_rows(device: str) -> int:
    """Return the minimum rows of a product with a head on a type of device."""
    return CPU_PRODUCT_ROWS if device == "cpu" else 1


def _budget(source: LogitRows) -> int:
    return source.block_bytes or block_bytes(source.device.type)


def _end_of_part(source: LogitRows, cells: Sequence[int], chunk_size: int | None, start: int) -> int:
    """Return the end of the part of units that begins at unit `start`."""
    if chunk_size is not None:
        if chunk_size < 1:
            raise ConfigError(
                f"chunk_size={chunk_size}: a chunk has at least 1 row; give a larger number, or none for the default"
            )
        return min(start + chunk_size, len(cells) - 1)
    fitting = bisect_right(cells, cells[start] + _budget(source) // 4) - 1
    return max(fitting, start + 1)


def _lengths(source: LogitRows, terms: Sequence[Term]) -> tuple[int, int]:
    """Return within how many rows a block's last step begins, and within how many while units of its steps overlap."""
    if source.is_product:
        usual = rows_at_once(source, terms)
        return usual, LONGEST * usual
    return 1, LONGEST * max(_budget(source) // (width_of(terms) * source.dtype.itemsize), 1)


def _matched(local: Block, concurrent: Sequence[Block]) -> Block:
    """Return the block with as many steps as the longest concurrent block: empty steps are appended."""
    empty = tuple((slice(units.stop, units.stop), slice(0, 0)) for units, _ in local.steps[-1])
    missing = max(len(block.steps) for block in concurrent) - len(local.steps)
    return Block(local.rows, local.steps + (empty,) * missing, any(block.overlaps for block in concurrent))


def _all_blocks(
    source: LogitRows, rows: Tensor, placed_terms: Sequence[_PlacedTerm], usual: int, overlapping: int
) -> Iterator[Block]:
    """Yield the blocks of all processes of a share; the rows are divided equally among them."""
    process_rows, begin, read_to = -(-len(rows) // source.share[1]), 0, 0
    cuts = _cuts_between_units(placed_terms, len(rows))
    while begin < len(rows):
        limit = min(begin + process_rows, len(rows))
        next_cut = cuts[bisect_left(cuts, limit)]
        limit = next_cut if next_cut - limit <= overlapping else limit
        while begin < limit:
            steps, next_begin, end = _steps_from(source, placed_terms, cuts, begin, limit, usual, overlapping)
            yield Block(rows[begin:end], tuple(steps), overlaps=begin < read_to)
            begin, read_to = next_begin, max(read_to, end)


def _steps_from(
    source: LogitRows,
    placed_terms: Sequence[_PlacedTerm],
    cuts: Sequence[int],
    begin: int,
    limit: int,
    usual: int,
    overlapping: int,
) -> tuple[list[Step], int, int]:
    """Return the steps of the block that begins at a row, the first row of the next block, and the end of this one."""
    steps, start, covered = [], begin, begin
    while start < min(limit, begin + (overlapping if start < covered else usual)):
        end = min([limit, *(placed.end_of_step(source, start) for placed in placed_terms)])
        if (last_cut := cuts[bisect_right(cuts, end) - 1]) > start:
            end = last_cut
        units = [placed.units_in(start, end) for placed in placed_terms]
        steps.append(
            tuple((part, placed.in_block(part, begin)) for placed, part in zip(placed_terms, units, strict=True))
        )
        covered = max(
            [covered, end, *(placed.end_of_units(part) for placed, part in zip(placed_terms, units, strict=True))]
        )
        start = end
    return steps, min(placed.next_begin(start) for placed in placed_terms), covered


def _cuts_between_units(placed_terms: Sequence[_PlacedTerm], num_rows: int) -> list[int]:
    """Return the rows, in ascending order, at which a block may begin or end, as no unit of any term spans them."""
    spans = np.zeros(num_rows + 1, np.int64)
    for placed in placed_terms:
        if placed.term.begins is not None:
            begins, term_rows = np.asarray(placed.term.begins), np.asarray(placed.host_positions, np.int64)
            np.add.at(spans, term_rows[begins[:-1]] + 1, 1)
            np.add.at(spans, term_rows[begins[1:] - 1] + 1, -1)
    cuts: list[int] = np.flatnonzero(spans.cumsum() == 0).tolist()
    return cuts


def _joined_rows(terms: Sequence[Term]) -> tuple[Tensor, list[_PlacedTerm]]:
    """Return the rows that any term needs, int64 [R], and the places of each term's rows among them."""
    if len(terms) == 1:
        (term,) = terms
        return term.rows, [_PlacedTerm(term, len(term.rows), term.rows, range(len(term.rows)))]

    def join(*rows_by_term: Tensor) -> list[Tensor]:
        rows = torch.cat(rows_by_term).unique()
        return [rows, *(torch.searchsorted(rows, term_rows) for term_rows in rows_by_term)]

    rows, *indices = compute_on_host(join, *(term.rows for term in terms))
    return rows, [
        _PlacedTerm(term, len(rows), index, to_list(index)) for term, index in zip(terms, indices, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _PlacedTerm:
    """A term, and the places of its rows among the rows of all terms."""

    term: Term
    num_rows: int
    """Number of rows of all terms."""
    positions: Tensor
    """int64 [R]"""
    host_positions: Sequence[int]
    most_rows: int | None = None
    """Limit on the rows of a step; by default the cells of its units are limited."""

    def end_of_step(self, source: LogitRows, begin: int) -> int:
        """Return the end of a step that begins at this row, so that it has no more of the term than allowed."""
        if self.most_rows is not None:
            return begin + self.most_rows
        start = self._first_unit(begin)
        if start == self.term.num_units:
            return self.num_rows
        stop = _end_of_part(source, self.term.cells, self.term.chunk_size, start)
        return self.num_rows if stop == self.term.num_units else self._rows_of(stop).start

    def units_in(self, begin: int, end: int) -> slice:
        return slice(self._first_unit(begin), self._first_unit(end))

    def end_of_units(self, units: slice) -> int:
        return self._rows_of(units.stop - 1).stop if units.stop > units.start else 0

    def next_begin(self, row: int) -> int:
        """Return the first row of the next unit that begins at this row or later; the number of rows if none does."""
        unit = self._first_unit(row)
        return self.num_rows if unit == self.term.num_units else self._rows_of(unit).start

    def in_block(self, units: slice, begin: int) -> slice | Tensor:
        """Return the positions of the units' rows in a block that begins at this row; empty for no units."""
        span = self.term.span(units)
        if span.start == span.stop:
            return slice(0, 0)
        first, last = self.host_positions[span.start], self.host_positions[span.stop - 1]
        if last - first == span.stop - span.start - 1:
            return slice(first - begin, last + 1 - begin)
        return self.positions[span] - begin

    def _rows_of(self, unit: int) -> slice:
        """Return the rows of a unit, from its first to its last."""
        span = self.term.span(slice(unit, unit + 1))
        return slice(self.host_positions[span.start], self.host_positions[span.stop - 1] + 1)

    def _first_unit(self, row: int) -> int:
        """Return the first unit that begins at this row or after it."""
        position = bisect_left(self.host_positions, row)
        return position if self.term.begins is None else bisect_left(self.term.begins, position)
