"""What a student rank reads as one tensor, whatever buffers its cells are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from nemo_opd.handoff.base import Handle, Receiver
from nemo_opd.handoff.plan import Box


@dataclass(frozen=True, slots=True)
class Part:
    """Cells of a region, and the buffer that has them."""

    handle: Handle
    source: Box
    """Where in the buffer."""
    target: Box
    """Where in the region."""

    def within(self, wanted: Box) -> Part:
        """What it has of the wanted cells, placed among them."""
        cells = self.target.meet(wanted)
        to_source = (
            self.source.rows.start - self.target.rows.start,
            self.source.positions.start - self.target.positions.start,
            self.source.columns.start - self.target.columns.start,
        )
        return Part(
            self.handle,
            cells.shifted(*to_source),
            cells.shifted(-wanted.rows.start, -wanted.positions.start, -wanted.columns.start),
        )


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor [rows, positions, columns] in the buffers of one or more ranks."""

    num_rows: int
    num_columns: int
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, handle: Handle) -> Region:
        """One buffer as it is."""
        num_rows, num_positions, num_columns = handle.shape
        box = Box(range(num_rows), range(num_positions), range(num_columns))
        return cls(num_rows, num_columns, (Part(handle, box, box),))

    def read(self, receiver: Receiver, texts: slice, width: int) -> Tensor:
        """Rows `texts`, the first `width` positions: [b, width, X].

        A view where one buffer has all of them, else copied together; positions that no buffer has, which are padding
        to every reader, are 0. Raises HandoffError for a buffer that cannot be mapped.
        """
        # All of them, needed now or not: each export is a reference that only its receiver can give back.
        mapped = {part.handle: receiver.tensor(part.handle) for part in self.parts}
        wanted = Box(range(self.num_rows)[texts], range(width), range(self.num_columns))
        parts = [part for part in (part.within(wanted) for part in self.parts) if part.target.num_cells]
        if len(parts) == 1 and parts[0].target.num_cells == wanted.num_cells:
            return mapped[parts[0].handle][parts[0].source.slices]
        return self._copied(receiver, mapped, parts, wanted)

    def _copied(
        self, receiver: Receiver, mapped: Mapping[Handle, Tensor], parts: Sequence[Part], wanted: Box
    ) -> Tensor:
        shape = len(wanted.rows), len(wanted.positions), len(wanted.columns)
        like = mapped[self.parts[0].handle]
        is_complete = sum(part.target.num_cells for part in parts) == wanted.num_cells
        result = like.new_empty(shape) if is_complete else like.new_zeros(shape)
        for part in parts:
            result[part.target.slices] = mapped[part.handle][part.source.slices]
            receiver.copied_bytes += part.target.num_cells * result.itemsize
        return result
