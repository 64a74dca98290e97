"""Losses of units with one row each, in the form that kernels take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

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

    @property
    def num_lists(self) -> int:
        return len(self.begins) - 1


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
        return self.student_of_cell.num_lists


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
