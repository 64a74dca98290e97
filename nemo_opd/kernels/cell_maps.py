"""Cells of two vocabularies, as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_opd.kernels import launch
from nemo_opd.kernels.forms import CellMap, EntryLists

_Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Memberships:
    """Which tokens of a vocabulary fall into which cells, M pairs of them."""

    tokens: _Ids
    """[M]"""
    cells: _Ids
    """[M]: any numbers."""
    weights: NDArray[np.float64]
    """[M], above 0."""
    vocab_size: int

    def within(self, cells: _Ids) -> Memberships:
        kept = np.isin(self.cells, cells)
        return Memberships(self.tokens[kept], self.cells[kept], self.weights[kept], self.vocab_size)

    def without(self, tokens: _Ids) -> Memberships:
        kept = ~np.isin(self.tokens, tokens)
        return Memberships(self.tokens[kept], self.cells[kept], self.weights[kept], self.vocab_size)

    def singles(self) -> tuple[_Ids, _Ids]:
        """Return the cells that hold one token only, whole, which is in no other; and these tokens."""
        per_cell = np.unique(self.cells, return_inverse=True, return_counts=True)
        is_alone = per_cell[2][per_cell[1]] == 1
        is_alone &= (np.bincount(self.tokens, minlength=self.vocab_size)[self.tokens] == 1) & (self.weights == 1)
        return self.cells[is_alone], self.tokens[is_alone]

    def sums(self) -> NDArray[np.float32]:
        return np.bincount(self.tokens, self.weights, self.vocab_size).astype(np.float32)


def cell_map(student: Memberships, teacher: Memberships, device: torch.device) -> CellMap:
    """Build the map of the cells that both sides have tokens in."""
    common = np.intersect1d(student.cells, teacher.cells)
    student, teacher = student.within(common), teacher.within(common)
    (own_cells, own), (other_cells, other) = student.singles(), teacher.singles()
    in_pairs, of_student, of_teacher = np.intersect1d(own_cells, other_cells, return_indices=True)
    own, other = own[of_student], other[of_teacher]
    partner = np.full(student.vocab_size, -1)
    partner[own] = other
    others, listed = (student.without(own), teacher.without(other)), np.setdiff1d(common, in_pairs)
    order, num_short = _order(listed, *others)
    rank = np.zeros(len(order), np.int64)
    rank[order] = np.arange(len(order))
    numbers = [rank[np.searchsorted(listed, side.cells)] for side in others]
    return CellMap(
        _readable(partner.astype(np.int32), device),
        _readable(student.sums(), device),
        _readable(teacher.sums(), device),
        _entries(numbers[0], others[0].tokens, others[0].weights, len(order), num_short, device),
        _entries(numbers[1], others[1].tokens, others[1].weights, len(order), num_short, device),
        _entries(others[0].tokens, numbers[0], others[0].weights, student.vocab_size, student.vocab_size, device),
        len(own),
    )


def _readable(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return them on a device with zeros behind, so that kernels read several at a time up to the last."""
    padded = np.pad(values, (0, -len(values) % launch.READ_AT_A_TIME))
    return torch.from_numpy(padded).to(device)[: len(values)]


def _order(cells: _Ids, student: Memberships, teacher: Memberships) -> tuple[_Ids, int]:
    """Order cells by their longer list, and count those whose lists are both short."""
    lengths = [np.bincount(np.searchsorted(cells, side.cells), minlength=len(cells)) for side in (student, teacher)]
    longest = np.maximum(*lengths)
    return np.argsort(longest, kind="stable"), int((longest <= launch.SHORT).sum())


def _entries(
    lists: _Ids, others: _Ids, weights: NDArray[np.float64], num_lists: int, num_short: int, device: torch.device
) -> EntryLists:
    order = np.argsort(lists, kind="stable")
    begins = np.append(0, np.bincount(lists, minlength=num_lists).cumsum())
    return EntryLists(
        torch.from_numpy(begins.astype(np.int32)).to(device),
        torch.from_numpy(others[order].astype(np.int32)).to(device),
        torch.from_numpy(weights[order].astype(np.float32)).to(device),
        num_short,
    )
