"""A tensor whose rows are in the buffers of one or more teacher ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nemo_opd.handoff.base import Receiver
from nemo_opd.handoff.handle import Handle
from nemo_opd.handoff.plan import overlap


@dataclass(frozen=True, slots=True)
class RegionPart:
    """Rows of a region, and the buffer that has them, with all positions and columns of the buffer."""

    handle: Handle
    first_row: int
    """First of the rows in the buffer."""
    rows: range
    """Rows of the region."""


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor [rows, positions, columns] of which each part has all columns."""

    num_rows: int
    parts: tuple[RegionPart, ...]

    def read(self, receiver: Receiver, rows: slice, width: int) -> Tensor:
        """Return rows of the region and their first `width` positions: [b, width, columns].

        This is a view where one buffer has all of them, else a copy; positions that no buffer has, which are padding
        to every reader, are 0. Raises HandoffError for a buffer that cannot be mapped.
        """
        # Map every buffer, needed now or not: each export is a reference that only its receiver can give back.
        mapped = [receiver.tensor(part.handle) for part in self.parts]
        wanted = range(self.num_rows)[rows]
        found: list[tuple[int, Tensor]] = []
        for part, buffer in zip(self.parts, mapped, strict=True):
            if shared := overlap(part.rows, wanted):
                begin = part.first_row + shared.start - part.rows.start
                found.append((shared.start - wanted.start, buffer[begin : begin + len(shared), :width]))
        shape = len(wanted), width, mapped[0].shape[2]
        if len(found) == 1 and found[0][1].shape == shape:
            return found[0][1]
        return _joined(receiver, found, mapped[0], shape)


def _joined(receiver: Receiver, found: Sequence[tuple[int, Tensor]], like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Copy tensors into one of `shape`, each at its first row."""
    result = like.new_empty(shape)
    if sum(source.numel() for _, source in found) < result.numel():
        result.zero_()
    for row, source in found:
        result[row : row + len(source), : source.shape[1]] = source
        receiver.copied_bytes += source.nbytes
    return result
