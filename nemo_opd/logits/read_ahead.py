"""A teacher's rows from a head, for many units at a time: thin products cost more than wide ones (methods.md §8.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_opd.logits.rows import LogitRows


class ReadAhead:
    """Rows of a source in the order of a term's units, read for a block of these while it is computed in steps.

    Holds the rows of one reading, as many as fit a budget, and lets go of them with the last.
    """

    def __init__(self, source: LogitRows, rows: Tensor, width: int, begins: Sequence[int] | None = None) -> None:
        """Prepare to read. rows: int64 [R] of [B·T], which the units need one after another. width: leading columns.

        begins: [U + 1], where units begin among the rows, on the host; None: each has one.
        """
        self._source, self._rows, self._width, self._begins = source, rows, width, begins
        # What several processes read together they must read equally often.
        self.is_worth_while = source.is_product and source.share == (0, 1)
        self._block, self._rows_at_once = slice(0, 0), 0
        self._read: Tensor | None = None
        self._read_from = self._read_to = 0

    def begin(self, units: slice, budget: int) -> None:
        """Announce the units that come next, in consecutive parts; budget: bytes of logits to hold."""
        self._block = self._span(units)
        self._rows_at_once = budget // (self._width * self._source.dtype.itemsize) if self.is_worth_while else 0
        self._read = None

    def of(self, units: slice) -> Tensor:
        """Return the rows of consecutive units [r, width] as the source reads them; not to be written to."""
        span = self._span(units)
        is_next = self._block.start <= span.start and span.stop <= self._block.stop
        if not is_next or span.stop - span.start >= self._rows_at_once:
            return self._source.read(self._rows[span], self._width)
        return self._within(span)

    def _within(self, span: slice) -> Tensor:
        """Return the rows of a part from what is held, reading the next rows where these are missing."""
        if self._read is None or not self._read_from <= span.start <= self._read_to:
            self._read_on(span.start)
        before = self._held(span.start, min(span.stop, self._read_to))
        if span.stop <= self._read_to:
            return before
        # Copied, so that the rows before it are gone when the next are made.
        before = before.clone()
        middle = self._read_to
        self._read_on(middle)
        return torch.cat([before, self._held(middle, span.stop)])

    def _read_on(self, start: int) -> None:
        self._read = None
        self._read_from, self._read_to = start, min(start + self._rows_at_once, self._block.stop)
        self._read = self._source.read(self._rows[start : self._read_to], self._width)

    def _held(self, start: int, stop: int) -> Tensor:
        assert self._read is not None
        held = self._read[start - self._read_from : stop - self._read_from]
        if stop == self._block.stop:
            self._read = None
        return held

    def _span(self, units: slice) -> slice:
        return units if self._begins is None else slice(self._begins[units.start], self._begins[units.stop])
