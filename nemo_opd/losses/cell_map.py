"""Projection of two vocabularies onto common cells, with each token in one cell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.errors import ProjectionError
from nemo_opd.losses.array_cache import cached_by_array
from nemo_opd.losses.sparse_projection import SparseProjection
from nemo_opd.losses.truncated import joined, with_tail_cell


@dataclass(frozen=True, slots=True)
class CommonCells:
    """X cells that contain tokens of both vocabularies, and the projections of both vocabularies onto them."""

    student: SparseProjection
    """Its `columns` are the cell ids [X] of the maps, ascending; −1 is the rest cell."""
    teacher: SparseProjection
    has_rest: bool
    """Whether the first cell is the rest cell."""

    @staticmethod
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
        return cached_by_array(
            lambda: _build(student_cells[:student_vocab_size], teacher_cells[:teacher_vocab_size], device),
            (student_cells, teacher_cells),
            CommonCells.of,
            student_vocab_size,
            teacher_vocab_size,
            device,
        )

    @staticmethod
    def of_prefixes(
        byte_prefix: NDArray[np.int32], student_vocab_size: int, teacher_vocab_size: int, device: torch.device
    ) -> CommonCells:
        """Build one cell per student token that a map [W], teacher → student token, reaches, and a rest cell.

        There is no rest cell if only one student token is unreached: it would be empty if that token got a cell of its
        own. Otherwise as `of`.
        """
        return cached_by_array(
            lambda: _build_reached(byte_prefix[:teacher_vocab_size], student_vocab_size, device),
            (byte_prefix,),
            CommonCells.of_prefixes,
            student_vocab_size,
            teacher_vocab_size,
            device,
        )

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


REST, NOWHERE = -1, -2
"""Ids of the cell for unmatched tokens, and of tokens in no cell."""


def _build_reached(teacher_cells: NDArray[np.int32], student_vocab_size: int, device: torch.device) -> CommonCells:
    student_cells = np.arange(student_vocab_size, dtype=np.int32)
    is_unreached = ~np.isin(student_cells, teacher_cells)
    student_cells[is_unreached] = REST if is_unreached.sum() > 1 else NOWHERE
    return _build(student_cells, teacher_cells, device)


def _build(student_cells: NDArray[np.int32], teacher_cells: NDArray[np.int32], device: torch.device) -> CommonCells:
    common = np.intersect1d(student_cells, teacher_cells).astype(np.int64)
    if common.max(initial=-1) < 0:
        raise ProjectionError(
            f"the projection's maps have no common cell within {len(student_cells)} student and {len(teacher_cells)} "
            "teacher tokens; it belongs to another pair of tokenizers, or they share nothing"
        )
    student, teacher = (_many_to_one(cells, common).to(device) for cells in (student_cells, teacher_cells))
    return CommonCells(student, teacher, has_rest=bool(common[0] == REST))


def _many_to_one(cells: NDArray[np.int32], common: NDArray[np.int64]) -> SparseProjection:
    """Build a projection whose rows have at most one entry, of weight 1."""
    token = np.flatnonzero(np.isin(cells, common))
    return SparseProjection.of_entries(token, cells[token].astype(np.int64), np.ones(len(token)), len(cells))
