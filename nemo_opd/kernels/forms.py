"""Losses of units with one row each, in the form that kernels take, and the map of two vocabularies to common cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.kernels import launch

FORWARD_KL, REVERSE_KL, MIXED, JSD, TVD = range(5)


@dataclass(frozen=True, slots=True)
class NegLogProb:
    """−log p of a token."""

    targets: Tensor
    """int64 [u]"""


@dataclass(frozen=True, slots=True)
class Measure:
    """Divergence of two distributions (methods.md §3.1)."""

    kind: int
    """FORWARD_KL, REVERSE_KL, MIXED, JSD or TVD."""
    weight: float = 0.0
    """Weight of forward KL for MIXED, β for JSD."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Divergence of two softmaxes, column by column."""

    teacher: Tensor
    """[u, X]: logits, any floating-point type but fp64."""
    temperature: float
    measure: Measure


@dataclass(frozen=True, slots=True)
class EntryLists:
    """Y lists of entries, with short lists of up to `launch.SHORT` entries first."""

    begins: Tensor
    """int32 [Y + 1]"""
    entries: Tensor
    """int32 [M]: tokens or cells."""
    weights: Tensor
    """fp32 [M], above 0."""
    num_short: int


@dataclass(frozen=True, slots=True)
class CellMap:
    """Map of the tokens of two vocabularies to cells. A token may be in several, with weights that sum to at most 1.

    Most cells are pairs: one token per side, with weight 1. The Y remaining cells have lists of tokens.
    """

    partner: Tensor
    """int32 [V]: the teacher token of a pair; −1 for tokens without a pair."""
    student_weights: Tensor
    """fp32 [V]: sum of each token's weights."""
    teacher_weights: Tensor
    """fp32 [W]"""
    student_of_cell: EntryLists
    """Y lists of tokens."""
    teacher_of_cell: EntryLists
    """Y lists of tokens, for the same cells in the same order."""
    cells_of_student: EntryLists
    """V lists of cells."""
    num_pairs: int

    @property
    def num_cells(self) -> int:
        return len(self.student_of_cell.begins) - 1


@dataclass(frozen=True, slots=True)
class CellComparison:
    """Divergence of two softmaxes renormalised on common cells, plus coverage · −log of the student's mass on them."""

    teacher: Tensor
    """[u, W]"""
    temperature: float
    measure: Measure
    cells: CellMap
    coverage: float = 0.0


RowForm = NegLogProb | Comparison | CellComparison


@dataclass(frozen=True, slots=True)
class RowLoss:
    """A loss that kernels can compute."""

    kind: type[RowForm]
    of: Callable[[slice], RowForm]
    """Function from a slice of units to their form."""


_Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Memberships:
    """M pairs of a vocabulary's tokens and their cells."""

    tokens: _Ids
    """[M]"""
    cells: _Ids
    """[M]: arbitrary ids."""
    weights: NDArray[np.float64]
    """[M], above 0."""
    vocab_size: int

    def within(self, cells: _Ids) -> Memberships:
        return self._select(np.isin(self.cells, cells))

    def without(self, tokens: _Ids) -> Memberships:
        return self._select(~np.isin(self.tokens, tokens))

    def singles(self) -> tuple[_Ids, _Ids]:
        """Return the cells that contain only one token, with weight 1, that is in only one cell; and these tokens."""
        _, inverse, counts = np.unique(self.cells, return_inverse=True, return_counts=True)
        is_single = counts[inverse] == 1
        is_single &= (np.bincount(self.tokens, minlength=self.vocab_size)[self.tokens] == 1) & (self.weights == 1)
        return self.cells[is_single], self.tokens[is_single]

    def sums(self) -> NDArray[np.float32]:
        """Return the sum of each token's weights, [vocab_size]."""
        return np.bincount(self.tokens, self.weights, self.vocab_size).astype(np.float32)

    def _select(self, is_selected: NDArray[np.bool_]) -> Memberships:
        return Memberships(
            self.tokens[is_selected], self.cells[is_selected], self.weights[is_selected], self.vocab_size
        )


def cell_map(student: Memberships, teacher: Memberships, device: torch.device) -> CellMap:
    """Build the map of cells that have tokens of both sides."""
    common = np.intersect1d(student.cells, teacher.cells)
    student, teacher = student.within(common), teacher.within(common)
    (student_cells, student_tokens), (teacher_cells, teacher_tokens) = student.singles(), teacher.singles()
    pair_cells, in_student, in_teacher = np.intersect1d(student_cells, teacher_cells, return_indices=True)
    student_tokens, teacher_tokens = student_tokens[in_student], teacher_tokens[in_teacher]
    partner = np.full(student.vocab_size, -1)
    partner[student_tokens] = teacher_tokens
    list_cells = np.setdiff1d(common, pair_cells)
    listed = student.without(student_tokens), teacher.without(teacher_tokens)
    order, num_short = _order(list_cells, *listed)
    rank = np.zeros(len(order), np.int64)
    rank[order] = np.arange(len(order))
    numbers = [rank[np.searchsorted(list_cells, side.cells)] for side in listed]
    return CellMap(
        _readable(partner.astype(np.int32), device),
        _readable(student.sums(), device),
        _readable(teacher.sums(), device),
        _lists(numbers[0], listed[0].tokens, listed[0].weights, len(order), num_short, device),
        _lists(numbers[1], listed[1].tokens, listed[1].weights, len(order), num_short, device),
        _lists(listed[0].tokens, numbers[0], listed[0].weights, student.vocab_size, student.vocab_size, device),
        len(student_tokens),
    )


def _readable(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the values on a device, followed in memory by zeros, so that kernels can read several at a time."""
    padded = np.pad(values, (0, -len(values) % launch.READ_AT_A_TIME))
    return torch.from_numpy(padded).to(device)[: len(values)]


def _order(cells: _Ids, student: Memberships, teacher: Memberships) -> tuple[_Ids, int]:
    """Return the order of cells by the length of their longer list, and the number of cells with two short lists."""
    lengths = [np.bincount(np.searchsorted(cells, side.cells), minlength=len(cells)) for side in (student, teacher)]
    longest = np.maximum(*lengths)
    return np.argsort(longest, kind="stable"), int((longest <= launch.SHORT).sum())


def _lists(
    lists: _Ids, entries: _Ids, weights: NDArray[np.float64], num_lists: int, num_short: int, device: torch.device
) -> EntryLists:
    """Group entries [M] by the number of their list [M]."""
    order = np.argsort(lists, kind="stable")
    begins = np.append(0, np.bincount(lists, minlength=num_lists).cumsum())
    return EntryLists(
        torch.from_numpy(begins.astype(np.int32)).to(device),
        torch.from_numpy(entries[order].astype(np.int32)).to(device),
        torch.from_numpy(weights[order].astype(np.float32)).to(device),
        num_short,
    )
