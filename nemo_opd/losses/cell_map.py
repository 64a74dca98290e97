"""Two vocabularies brought onto common cells, each token into one cell, as sums over segments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.errors import ProjectionError
from nemo_opd.losses.made_once import made_once
from nemo_opd.losses.sparse_projection import SparseProjection
from nemo_opd.losses.truncated import joined, reached_and_rest


@dataclass(frozen=True, slots=True)
class CommonCells:
    """The cells that tokens of both vocabularies fall into, X of them, and both vocabularies projected onto them."""

    student: SparseProjection
    """Its `columns` are the cells [X] as the maps name them, ascending; −1 is the rest cell."""
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
        """Make cells from maps [V] and [W], token → cell, within the given sizes on `device`; kept while the maps live.

        A cell that only one side has a token for would make some divergences infinite whatever the student does; it is
        left out, the rest cell too (methods.md §3.3). Raises ProjectionError where no cell but the rest is common.
        """
        return made_once(
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
        """Make cells from a map [W] of teacher to student tokens: one for each student token reached, and a rest.

        No rest cell where a single student token is left for it: taken out of it, that token would leave it empty. As
        `of` otherwise.
        """
        return made_once(
            lambda: _build_reached(byte_prefix[:teacher_vocab_size], student_vocab_size, device),
            (byte_prefix,),
            CommonCells.of_prefixes,
            student_vocab_size,
            teacher_vocab_size,
            device,
        )

    def reached(self, teacher: Tensor, student: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-masses of cells [U, ≥ X], and rest [U, 1], of a truncated teacher, as `reached_and_rest`."""
        if not self.has_rest:
            return reached_and_rest(teacher, student, rest)
        return reached_and_rest(teacher[:, 1:], student[:, 1:], joined(rest, teacher[:, :1]), student[:, :1])

    def column_of(self, cells: Tensor) -> Tensor:
        """Return the columns in [U, X] of student tokens, int64; −1 for tokens that are no cell."""
        column = torch.searchsorted(self.student.columns, cells).clamp(max=self.num_cells - 1)
        return column.masked_fill(self.student.columns[column] != cells, -1)

    @property
    def num_cells(self) -> int:
        return self.student.num_columns

    def cells_per_unit(self, student_vocab_size: int, teacher_vocab_size: int) -> int:
        """Count fp32 numbers alive per unit at the peak of a chunk, with a divergence on the cells."""
        entries = self.student.num_entries + self.teacher.num_entries
        return 5 * student_vocab_size + 3 * teacher_vocab_size + 3 * entries + 12 * self.num_cells


REST, NOWHERE = -1, -2
"""Cells of tokens without their own."""


def _build_reached(teacher_cells: NDArray[np.int32], student_vocab_size: int, device: torch.device) -> CommonCells:
    student_cells = np.arange(student_vocab_size, dtype=np.int32)
    others = ~np.isin(student_cells, teacher_cells)
    student_cells[others] = REST if others.sum() > 1 else NOWHERE
    return _build(student_cells, teacher_cells, device)


def _build(student_cells: NDArray[np.int32], teacher_cells: NDArray[np.int32], device: torch.device) -> CommonCells:
    common = np.intersect1d(student_cells, teacher_cells).astype(np.int64)
    if common.max(initial=-1) < 0:
        raise ProjectionError(
            f"the maps of the projection have no cell within {len(student_cells)} student and {len(teacher_cells)} "
            "teacher tokens that both sides reach; it belongs to another pair of tokenizers, or they share nothing"
        )
    student, teacher = (_many_to_one(cells, common).to(device) for cells in (student_cells, teacher_cells))
    return CommonCells(student, teacher, has_rest=bool(common[0] == REST))


def _many_to_one(cells: NDArray[np.int32], common: NDArray[np.int64]) -> SparseProjection:
    """Make a projection whose rows have one entry, of weight 1, or none."""
    token = np.flatnonzero(np.isin(cells, common))
    return SparseProjection.of_entries(token, cells[token].astype(np.int64), np.ones(len(token)), len(cells))
