"""A teacher's rows from a head, computed for many units at a time, as small products are slow (methods.md §8.2)."""

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
    """Rows of one product with a head, shared by all readers of the same rows."""

    rows: Tensor | None = None
    """[stop − start, width]; None if not read yet or no longer needed."""
    start: int = 0
    stop: int = 0
    num_readers: int = 1
    finished: set[int] = field(default_factory=set)
    """Ids of the readers that have read the last row of the block."""


class ReadAhead:
    """Rows of a source in the order of a term's units, read in large parts while a block is computed in small steps.

    Holds the rows of one read, at most as many as announced, and releases them after the last.
    """

    def __init__(self, source: LogitRows, rows: Tensor, width: int, begins: Sequence[int] | None = None) -> None:
        """Prepare to read.

        rows: int64 [R], indices into [B·T], in the order of the units. width: leading columns. begins: [U + 1] on the
        host, index of each unit's first row; by default each unit has one row.
        """
        self._source, self._rows, self._width, self._begins = source, rows, width, begins
        self.row_bytes = width * source.dtype.itemsize
        # Processes that read a source collectively must read it equally often.
        self.is_worth_while = source.is_product and source.share == (0, 1)
        self._block, self._rows_at_once = slice(0, 0), 0
        self._reading = _Reading()

    def is_shared_with(self, ahead: ReadAhead) -> bool:
        """Return whether both share the rows that they have read."""
        return self._reading is ahead._reading

    def share_with(self, earlier: ReadAhead) -> None:
        """Use the rows that `earlier` reads, if the host knows that both read the same rows."""
        if self.is_shared_with(earlier) or self._source is not earlier._source or self._width != earlier._width:
            return
        rows, earlier_rows = on_host(self._rows), on_host(earlier._rows)
        if rows is not None and earlier_rows is not None and torch.equal(rows, earlier_rows):
            self._reading = earlier._reading
            self._reading.num_readers += 1

    def begin(self, units: slice, rows_at_once: int) -> None:
        """Announce the units that are read next, in consecutive parts. rows_at_once: maximum rows to hold."""
        self._block = self._span(units)
        self._rows_at_once = rows_at_once if self.is_worth_while else 0
        self._reading.rows = None
        self._reading.finished.clear()

    def of(self, units: slice) -> Tensor:
        """Return the rows of consecutive units [r, width] in the source's dtype. The caller must not write to them."""
        span = self._span(units)
        is_announced = self._block.start <= span.start and span.stop <= self._block.stop
        most = self._rows_at_once if self._reading.num_readers > 1 else self._rows_at_once - 1
        if not is_announced or span.stop - span.start > most:
            return self._source.read(self._rows[span], self._width)
        return self._read_ahead(span)

    def _read_ahead(self, span: slice) -> Tensor:
        """Return rows of the announced block from the held rows; read the next rows if some are missing."""
        reading = self._reading
        if reading.rows is None or not reading.start <= span.start <= reading.stop:
            self._read_from(span.start)
        held = self._take(span.start, min(span.stop, reading.stop))
        if span.stop <= reading.stop:
            return held
        # Copied first, so that the held rows are freed before the next are read.
        joined = empty_rows(span.stop - span.start, self._width, held.dtype, held.device)
        joined[: len(held)] = held
        del held
        middle = reading.stop
        self._read_from(middle)
        joined[middle - span.start :] = self._take(middle, span.stop)
        return joined

    def _read_from(self, start: int) -> None:
        """Replace the held rows by as many as announced, from row `start` on."""
        reading = self._reading
        reading.rows = None
        reading.start, reading.stop = start, min(start + self._rows_at_once, self._block.stop)
        reading.rows = self._source.read(self._rows[start : reading.stop], self._width)

    def _take(self, start: int, stop: int) -> Tensor:
        """Return held rows, and release the reading once all readers have taken the last row of the block."""
        reading = self._reading
        assert reading.rows is not None
        rows = reading.rows[start - reading.start : stop - reading.start]
        if stop == self._block.stop:
            reading.finished.add(id(self))
            if len(reading.finished) == reading.num_readers:
                reading.rows = None
        return rows

    def _span(self, units: slice) -> slice:
        return units if self._begins is None else slice(self._begins[units.start], self._begins[units.stop])
