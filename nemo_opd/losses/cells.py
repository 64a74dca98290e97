"""Cells on which two vocabularies are compared: projections onto common cells, maps for kernels, one-to-one pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.errors import ProjectionError
from nemo_opd.kernels.forms import CellMap, Memberships, cell_map
from nemo_opd.logits.term import GradientSink, Term, UnitRows
from nemo_opd.losses.chunk_loss import ChunkInputs, OnCells, first_position_term
from nemo_opd.losses.divergence import Divergence, compare_logits, compare_with_gradient
from nemo_opd.losses.fused import fused, softmax
from nemo_opd.losses.sparse_projection import (
    SparseProjection,
    TokenPairs,
    add_pulled_back,
    cached_while_alive,
    entries_within,
    pairs_within,
    project,
)
from nemo_opd.losses.support import joined, split, with_tail_cell

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_REST, _NOWHERE = -1, -2
"""Ids of the cell for unmatched tokens, and of tokens in no cell."""


@dataclass(frozen=True, slots=True)
class CommonCells:
    """X cells that contain tokens of both vocabularies, and the projections of both vocabularies onto them."""

    student: SparseProjection
    """Its `columns` are the cell ids [X] of the maps, ascending; −1 is the rest cell."""
    teacher: SparseProjection
    has_rest: bool
    """Whether the first cell is the rest cell."""

    @staticmethod
    @cached_while_alive
    def of(
        student_cells: NDArray[np.int32],
        teacher_cells: NDArray[np.int32],
        student_vocab_size: int,
        teacher_vocab_size: int,
        device: torch.device,
    ) -> CommonCells:
        """Build the cells of maps token → cell, [V] and [W], within the given sizes; cached while the maps live.

        Cells, including the rest cell, with tokens of only one side are left out, since they would make some
        divergences infinite whatever the student does (methods.md §3.3). Raises ProjectionError if no cell but the rest
        is common.
        """
        return _build_cells(student_cells[:student_vocab_size], teacher_cells[:teacher_vocab_size], device)

    @staticmethod
    @cached_while_alive
    def of_prefixes(
        byte_prefix: NDArray[np.int32], student_vocab_size: int, teacher_vocab_size: int, device: torch.device
    ) -> CommonCells:
        """Build one cell per student token that a map [W], teacher → student token, reaches, and a rest cell.

        There is no rest cell if only one student token is unreached: it would be empty if that token got a cell of its
        own. Otherwise as `of`.
        """
        student_cells, teacher_cells = np.arange(student_vocab_size, dtype=np.int32), byte_prefix[:teacher_vocab_size]
        is_unreached = ~np.isin(student_cells, teacher_cells)
        student_cells[is_unreached] = _REST if is_unreached.sum() > 1 else _NOWHERE
        return _build_cells(student_cells, teacher_cells, device)

    def reached(self, teacher: Tensor, student: Tensor, log_rest: Tensor) -> tuple[Tensor, Tensor]:
        """Apply `with_tail_cell` to log-masses of cells [U, ≥ X] and a truncated teacher's rest [U, 1]."""
        if not self.has_rest:
            return with_tail_cell(teacher, student, log_rest)
        return with_tail_cell(teacher[:, 1:], student[:, 1:], joined(log_rest, teacher[:, :1]), student[:, :1])

    def column_of(self, cells: Tensor) -> Tensor:
        """Return the cell index of each student token, int64, or −1 if it is not a cell by itself."""
        column = torch.searchsorted(self.student.columns, cells).clamp(max=self.num_cells - 1)
        return column.masked_fill(self.student.columns[column] != cells, -1)

    @property
    def num_cells(self) -> int:
        return self.student.num_columns

    def cells_per_unit(self, student_vocab_size: int, teacher_vocab_size: int) -> int:
        """Count fp32 numbers per unit at the memory peak of a block, with a divergence on the cells."""
        entries = self.student.num_entries + self.teacher.num_entries
        return 5 * student_vocab_size + 3 * teacher_vocab_size + 3 * entries + 12 * self.num_cells


def _build_cells(
    student_cells: NDArray[np.int32], teacher_cells: NDArray[np.int32], device: torch.device
) -> CommonCells:
    common = np.intersect1d(student_cells, teacher_cells).astype(np.int64)
    if common.max(initial=-1) < 0:
        raise ProjectionError(
            f"the projection's maps have no common cell within {len(student_cells)} student and {len(teacher_cells)} "
            "teacher tokens; it belongs to another pair of tokenizers, or they share nothing"
        )
    student, teacher = (_many_to_one(cells, common).to(device) for cells in (student_cells, teacher_cells))
    return CommonCells(student, teacher, has_rest=bool(common[0] == _REST))


def _many_to_one(cells: NDArray[np.int32], common: NDArray[np.int64]) -> SparseProjection:
    """Build a projection whose rows have at most one entry, of weight 1."""
    token = np.flatnonzero(np.isin(cells, common))
    return SparseProjection.of_entries(token, cells[token].astype(np.int64), np.ones(len(token)), len(cells))


def common_cells_term(
    inputs: ChunkInputs, cells: CommonCells, compare: Divergence, on_cells: OnCells | None = None
) -> Term:
    """Build the term τ² · Σ divergence over units, on cells that tokens of both sides are summed in.

    on_cells: the same comparison for kernels.
    """

    def unit_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        if inputs.is_truncated:
            log_q, log_rest = split(teacher)
            log_masses = cells.teacher.log_project(log_q), cells.student.log_project(student)
            return compare.of_logits(*cells.reached(*log_masses, log_rest))
        return compare.of_logits(cells.teacher.log_project(teacher), cells.student.log_project(student))

    def unit_loss_onto(student: UnitRows, teacher: UnitRows, part: slice, onto: GradientSink) -> Tensor:
        log_q, _ = project(teacher, cells.teacher, has_shares=False)
        log_p, shares = project(student, cells.student)
        value, gradient = compare_with_gradient(log_q, log_p, compare)
        add_pulled_back(gradient, shares, cells.student, onto)
        return value

    return first_position_term(
        inputs,
        unit_loss,
        cells_per_unit=cells.cells_per_unit(inputs.student_size, inputs.teacher_size),
        compare_onto=unit_loss_onto,
        on_cells=on_cells,
    )


@cached_while_alive
def covered_columns(projection: ProjectionMatrix, students: int, teachers: int, device: torch.device) -> CellMap:
    """Return one cell per teacher token that a projection reaches (methods.md §5.3)."""
    student = Memberships(*entries_within(projection, students, teachers), students)
    return cell_map(student, _one_cell_each(np.arange(teachers)), device)


@cached_while_alive
def common_cells(
    student_cells: NDArray[np.int32],
    teacher_cells: NDArray[np.int32],
    students: int,
    teachers: int,
    device: torch.device,
) -> CellMap:
    """Return the cells of maps token → cell that have tokens of both sides (methods.md §5.8)."""
    return cell_map(_one_cell_each(student_cells[:students]), _one_cell_each(teacher_cells[:teachers]), device)


@cached_while_alive
def pairs_and_rest(
    projection: ProjectionMatrix, students: int, teachers: int, device: torch.device, has_rest: bool
) -> CellMap:
    """Return one cell per exact pair, and with has_rest one for all other tokens (methods.md §5.6)."""
    student_ids, teacher_ids = pairs_within(projection, students, teachers)
    student_cells, teacher_cells = np.full(students, _REST), np.full(teachers, _REST)
    student_cells[student_ids] = teacher_cells[teacher_ids] = np.arange(len(student_ids))
    student, teacher = _one_cell_each(student_cells), _one_cell_each(teacher_cells)
    if not has_rest:
        student, teacher = (side.within(np.arange(len(student_ids))) for side in (student, teacher))
    return cell_map(student, teacher, device)


def _one_cell_each(cells: NDArray[np.int64] | NDArray[np.int32]) -> Memberships:
    """Build memberships from a map token → cell, each with weight 1."""
    return Memberships(np.arange(len(cells)), cells.astype(np.int64), np.ones(len(cells)), len(cells))


@fused
def add_comparison_of_pairs(
    student: UnitRows,
    teacher: UnitRows,
    pairs: TokenPairs,
    divergence: Divergence,
    has_rest: bool,
    onto: GradientSink,
    weight: float = 1.0,
    slopes: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Compare logits/τ of units, [u, V] and [u, W], on X pairs → [u], and add weight · gradient to `onto`.

    has_rest: add one cell for each side's unpaired tokens; otherwise both sides are renormalised on the pairs. slopes,
    only with a rest cell: derivatives [u, V] of another loss with respect to the probabilities of unpaired tokens, 0
    for paired ones, and a factor of them; the gradient of that loss is added too.
    """
    student_logits = student.gather()
    teacher_logits = teacher.gather().to(student_logits.dtype)
    student_cells = student_logits.index_select(1, pairs.student)
    teacher_cells = teacher_logits.index_select(1, pairs.teacher)
    if not has_rest:
        comparison = compare_logits(teacher_cells, student_cells, divergence)
        onto.add(_token_gradient(comparison.gradient, torch.zeros_like(student_logits), pairs).mul_(weight))
        return comparison.value
    lowest = torch.finfo(student_logits.dtype).min
    is_unpaired = pairs.place < 0
    p_in_rest, log_rest = softmax.function(torch.where(is_unpaired, student_logits.clamp(min=lowest), lowest))
    student_cells = _with_rest(student_cells, log_rest, student_logits.amax(-1, keepdim=True))
    log_rest = softmax.function(teacher_logits.index_select(1, pairs.teacher_rest).clamp(min=lowest))[1]
    teacher_cells = _with_rest(teacher_cells, log_rest, teacher_logits.amax(-1, keepdim=True))
    comparison = compare_logits(teacher_cells, student_cells, divergence)
    cell_gradient, rest_gradient = comparison.gradient.mul_(weight), comparison.gradient[:, -1:]
    if slopes is not None:
        p_slopes, factor = slopes
        scaled_rest = factor * comparison.s[:, -1:]
        mean_slope = scaled_rest * (p_in_rest * p_slopes).sum(-1, keepdim=True)
        cell_gradient = cell_gradient - mean_slope * comparison.s
        rest_gradient = cell_gradient[:, -1:] + scaled_rest * p_slopes
    onto.add(_token_gradient(cell_gradient[:, :-1], rest_gradient * p_in_rest, pairs))
    return comparison.value


def _with_rest(cells: Tensor, log_rest: Tensor, peak: Tensor) -> Tensor:
    """Append a rest cell, float64 [u, 1], to cells [u, X], all minus a peak: fp32 keeps more digits near 0."""
    return torch.cat([cells - peak, (log_rest - peak).to(cells.dtype)], -1)


def _token_gradient(pair_gradient: Tensor, unpaired_gradient: Tensor, pairs: TokenPairs) -> Tensor:
    """Combine gradients of pairs [u, X] and of unpaired student tokens, in their columns of [u, V], into [u, V]."""
    is_paired = pairs.place >= 0
    return torch.where(is_paired, pair_gradient.index_select(1, pairs.place.clamp(min=0)), unpaired_gradient)
