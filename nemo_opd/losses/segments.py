"""Segments of unequal length as dense blocks, in which every operation runs along whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_EXACT_LENGTH = 4
"""Segments up to this length are not padded; longer ones are, to a power of two."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Y segments of entries, laid out as M cells: segments of about one length together, padded, and one cell more.

    Reductions run in a fixed order, so that repeated calls agree to the bit on every device.
    """

    entries: Tensor
    """int64 [M]: the entry in a cell; −1 where it is padding, as in the last."""
    order: Tensor
    """int64 [Y]: segments in the order of the layout."""
    groups: tuple[tuple[int, int], ...]
    """Length and number of the segments of each group; cell j of all of them comes before cell j + 1."""

    @staticmethod
    def of(offsets: NDArray[np.int64]) -> Segments:
        """Lay out segments; segment i is entries[offsets[i]:offsets[i + 1]] and may be empty."""
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

    def each(self, cells: Tensor, of_segments: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of [U, M] and [U, Y], group by group: cells [U, length, number] and segments [U, number]."""
        numbers = [number for _, number in self.groups]
        yield from zip(self._groups(cells), of_segments.split(numbers, 1), strict=True)

    def max(self, cells: Tensor) -> Tensor:
        """Take the maximum of each segment: [U, M] → [U, Y]."""
        return torch.cat([cells[:, :0], *(own.amax(1) for own in self._groups(cells))], 1)

    def sum(self, cells: Tensor) -> Tensor:
        """Sum each segment: [U, M] → [U, Y]; padding is added too."""
        return torch.cat([cells[:, :0], *(own.sum(1) for own in self._groups(cells))], 1)

    def _groups(self, cells: Tensor) -> Iterator[Tensor]:
        """Yield views of [U, M], group by group: [U, length, number]."""
        cell = 0
        for length, number in self.groups:
            yield cells.narrow(1, cell, length * number).unflatten(1, (length, number))
            cell += length * number
