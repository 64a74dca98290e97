"""Segments of unequal length laid out as dense blocks, for operations along full rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_EXACT_LENGTH = 4
"""Longest segment length without padding; longer segments are padded to a power of two."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Y segments of entries in a layout of M cells: padded, grouped by length, and followed by one padding cell.

    Reductions run in a fixed order, so that repeated calls agree bitwise on every device.
    """

    entries: Tensor
    """int64 [M]: each cell's entry, −1 for padding, as in the last cell."""
    order: Tensor
    """int64 [Y]: segment indices in the order of the layout."""
    groups: tuple[tuple[int, int], ...]
    """(length, number of segments) of each group; in a group, cell j of all segments precedes cell j + 1."""

    @staticmethod
    def of(offsets: NDArray[np.int64]) -> Segments:
        """Lay out segments entries[offsets[i]:offsets[i + 1]], which may be empty."""
        begins, lengths = offsets[:-1], np.diff(offsets)
        padded = np.maximum(lengths, 1)
        padded = np.where(padded > _EXACT_LENGTH, 2 ** np.ceil(np.log2(padded)), padded)
        order = np.argsort(padded, kind="stable")
        groups, cells = [], []
        for length in np.unique(padded).astype(np.int64):
            segments, place = order[padded[order] == length], np.arange(length)[:, None]
            cells.append(np.where(place < lengths[segments], begins[segments] + place, -1).ravel())
            groups.append((int(length), len(segments)))
        entries = np.concatenate([*cells, [-1]]).astype(np.int64)
        return Segments(torch.from_numpy(entries), torch.from_numpy(order), tuple(groups))

    def to(self, device: torch.device) -> Segments:
        return Segments(self.entries.to(device), self.order.to(device), self.groups)

    def each(self, cells: Tensor, segment_values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of cells [U, M] and segments [U, Y] per group: [U, length, number] and [U, number]."""
        numbers = [number for _, number in self.groups]
        yield from zip(self._groups(cells), segment_values.split(numbers, 1), strict=True)

    def max(self, cells: Tensor) -> Tensor:
        """Take the maximum of each segment: [U, M] → [U, Y]."""
        return torch.cat([cells[:, :0], *(group.amax(1) for group in self._groups(cells))], 1)

    def sum(self, cells: Tensor) -> Tensor:
        """Sum each segment, including its padding: [U, M] → [U, Y]."""
        return torch.cat([cells[:, :0], *(group.sum(1) for group in self._groups(cells))], 1)

    def _groups(self, cells: Tensor) -> Iterator[Tensor]:
        """Yield views of cells [U, M] per group: [U, length, number]."""
        cell = 0
        for length, number in self.groups:
            yield cells.narrow(1, cell, length * number).unflatten(1, (length, number))
            cell += length * number
