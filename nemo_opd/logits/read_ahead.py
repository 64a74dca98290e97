"""A teacher's rows from a head, for many units at a time: thin products cost more than wide ones (methods.md §8.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import on_host
from nemo_opd.logits.aligned import empty_rows
from nemo_opd.logits.rows import LogitRows


@dataclass(slots=True)
class _Reading:
    """The rows of one product with a head, for all that read the same."""

    rows: Tensor | None = None
    """[stop − start, width]; None: not read yet, or not needed any more."""
    start: int = 0
    stop: int = 0
    num_readers: int = 1
    finished: set[int] = field(default_factory=set)
    """Ids of the readers that have taken the last row of the block."""


class ReadAhead:
    """Rows of a source in the order of a term's units, read for a block of these while it is computed in steps.

    Holds the rows of one reading, as many as are announced, and lets go of them with the last.
    """

    def __init__(self, source: LogitRows, rows: Tensor, width: int, begins: Sequence[int] | None = None) -> None:
        """Prepare to read. rows: int64 [R] of [B·T], which the units need one after another. width: leading columns.

        begins: [U + 1], where units begin among the rows, on the host; None: each has one.
        """
        self._source, self._rows, self._width, self._begins = source, rows, width, begins
        self.row_bytes = width * source.dtype.itemsize
        # What several processes read together they must read equally often.
        self.is_worth_while = source.is_product and source.share == (0, 1)
        self._block, self._rows_at_once = slice(0, 0), 0
        self._reading = _Reading()

    def is_shared_with(self, other: ReadAhead) -> bool:
        """Return whether a row that one has read is not read again by the other."""
        return self._reading is other._reading

    def share_with(self, other: ReadAhead) -> None:
        """Take rows that the other has read, if both read the same rows, as far as the host knows them."""
        if self.is_shared_with(other) or self._source is not other._source or self._width != other._width:
            return
        rows, other_rows = on_host(self._rows), on_host(other._rows)
        if rows is not None and other_rows is not None and torch.equal(rows, other_rows):
            self._reading = other._reading
            self._reading.num_readers += 1

    def begin(self, units: slice, rows_at_once: int) -> None:
        """Announce the units that come next, in consecutive parts; rows_at_once: rows to hold."""
        self._block = self._span(units)
        self._rows_at_once = rows_at_once if self.is_worth_while else 0
        self._reading.rows = None
        self._reading.finished.clear()

    def of(self, units: slice) -> Tensor:
        """Return the rows of consecutive units [r, width] as the source reads them; not to be written to."""
        span = self._span(units)
        is_next = self._block.start <= span.start and span.stop <= self._block.stop
        most = self._rows_at_once if self._reading.num_readers > 1 else self._rows_at_once - 1
        if not is_next or span.stop - span.start > most:
            return self._source.read(self._rows[span], self._width)
        return self._within(span)

    def _within(self, span: slice) -> Tensor:
        """Return the rows of a part from what is held, reading the next rows where these are missing."""
        reading = self._reading
        if reading.rows is None or not reading.start <= span.start <= reading.stop:
            self._read_on(span.start)
        before = self._held(span.start, min(span.stop, reading.stop))
        if span.stop <= reading.stop:
            return before
        # Copied before the next rows are made, so that those held until now are gone by then.
        joined = empty_rows(span.stop - span.start, self._width, before.dtype, before.device)
        joined[: len(before)] = before
        del before
        middle = reading.stop
        self._read_on(middle)
        joined[middle - span.start :] = self._held(middle, span.stop)
        return joined

    def _read_on(self, start: int) -> None:
        reading = self._reading
        reading.rows = None
        reading.start, reading.stop = start, min(start + self._rows_at_once, self._block.stop)
        reading.rows = self._source.read(self._rows[start : reading.stop], self._width)

    def _held(self, start: int, stop: int) -> Tensor:
        reading = self._reading
        assert reading.rows is not None
        held = reading.rows[start - reading.start : stop - reading.start]
        if stop == self._block.stop:
            reading.finished.add(id(self))
            if len(reading.finished) == reading.num_readers:
                reading.rows = None
        return held

    def _span(self, units: slice) -> slice:
        return units if self._begins is None else slice(self._begins[units.start], self._begins[units.stop])
