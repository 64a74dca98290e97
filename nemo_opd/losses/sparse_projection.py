"""A projection matrix on a device, ordered for sums over its columns and over its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.errors import ProjectionError
from nemo_opd.losses.made_once import made_once

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


@dataclass(frozen=True, slots=True)
class Entries:
    """Nonzero entries of R in one order; segment i is entries[offsets[i]:offsets[i + 1]]."""

    student: Tensor
    """int64 [nnz]: row of R, a student token."""
    column: Tensor
    """int64 [nnz]: index into the covered columns."""
    log_weight: Tensor
    """float64 [nnz, 1]"""
    offsets: Tensor
    """int64"""

    def to(self, device: torch.device) -> Entries:
        return Entries(
            self.student.to(device), self.column.to(device), self.log_weight.to(device), self.offsets.to(device)
        )


@dataclass(frozen=True, slots=True)
class SparseProjection:
    """R with its covered columns only, X of them: those that some row reaches."""

    columns: Tensor
    """int64 [X]: covered teacher tokens, ascending."""
    by_column: Entries
    """X segments."""
    by_student: Entries
    """V segments, empty where a student token reaches nothing."""

    @staticmethod
    def of(
        projection: ProjectionMatrix, student_vocab_size: int, teacher_vocab_size: int, device: torch.device
    ) -> SparseProjection:
        """The matrix within the given vocabulary sizes on `device`, made once as long as the matrix lives.

        Raises ProjectionError where no entry is left.
        """
        indices, weights = projection.indices, projection.weights
        sizes = student_vocab_size, teacher_vocab_size
        return made_once(
            lambda: _build(indices, weights, *sizes).to(device), (indices, weights), SparseProjection, *sizes, device
        )

    @property
    def num_columns(self) -> int:
        return len(self.columns)

    @property
    def num_entries(self) -> int:
        return len(self.by_column.student)

    def to(self, device: torch.device) -> SparseProjection:
        return SparseProjection(self.columns.to(device), self.by_column.to(device), self.by_student.to(device))

    def log_project(self, log_mass: Tensor) -> Tensor:
        """log(Rᵀ exp(log_mass)) on the covered columns: [U, V] → [U, X], in log space throughout (METHODS §5).

        Sums run in a fixed order, so repeated calls agree to the bit on every device.
        """
        return _LogProject.apply(log_mass, self)


class _LogProject(torch.autograd.Function):
    """A log-sum-exp over the entries of each column; inside, units are the last axis, so that an entry is one row."""

    @staticmethod
    def forward(ctx: Any, log_mass: Tensor, sparse: SparseProjection) -> Tensor:
        mass_VU = log_mass.t().contiguous()
        entries = sparse.by_column
        cells = mass_VU.index_select(0, entries.student).add_(entries.log_weight.to(mass_VU.dtype))
        # A column whose cells are all −inf would give −inf − −inf.
        peak = _segment("max", cells, entries.offsets).clamp_(min=torch.finfo(cells.dtype).min)
        cells.sub_(peak.index_select(0, entries.column)).exp_()
        projected_XU = _segment("sum", cells, entries.offsets).log_().add_(peak)
        ctx.sparse = sparse
        ctx.save_for_backward(mass_VU, projected_XU)
        return projected_XU.t().contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        mass_VU, projected_XU = ctx.saved_tensors
        entries = ctx.sparse.by_student
        shares = mass_VU.index_select(0, entries.student).add_(entries.log_weight.to(mass_VU.dtype))
        column_mass = projected_XU.clamp(min=torch.finfo(shares.dtype).min)
        shares.sub_(column_mass.index_select(0, entries.column)).exp_()
        shares.mul_(grad_output.t().contiguous().index_select(0, entries.column))
        return _segment("sum", shares, entries.offsets).t(), None


def _segment(reduce: str, cells: Tensor, offsets: Tensor) -> Tensor:
    """Unlike scatter_add on CUDA, no atomics: the order of a sum does not change from run to run."""
    return torch.segment_reduce(cells, reduce, offsets=offsets, axis=0, unsafe=True)


def _build(
    indices: np.ndarray, weights: np.ndarray, student_vocab_size: int, teacher_vocab_size: int
) -> SparseProjection:
    indices, weights = indices[:student_vocab_size], weights[:student_vocab_size]
    student, slot = np.nonzero((indices >= 0) & (indices < teacher_vocab_size) & (weights > 0))
    if not len(student):
        raise ProjectionError(
            f"the projection has no entry within {student_vocab_size} student and {teacher_vocab_size} teacher tokens; "
            "it belongs to another pair of tokenizers, or they have nothing in common"
        )
    columns, column = np.unique(indices[student, slot], return_inverse=True)
    log_weight = np.log(weights[student, slot].astype(np.float64))
    order = np.argsort(column, kind="stable")
    return SparseProjection(
        torch.from_numpy(columns.astype(np.int64)),
        _entries(student[order], column[order], log_weight[order], column[order], len(columns)),
        _entries(student, column, log_weight, student, student_vocab_size),
    )


def _entries(
    student: np.ndarray, column: np.ndarray, log_weight: np.ndarray, segment: np.ndarray, num_segments: int
) -> Entries:
    """`segment` is sorted."""
    return Entries(
        torch.from_numpy(student.astype(np.int64)),
        torch.from_numpy(column.astype(np.int64)),
        torch.from_numpy(log_weight).unsqueeze(1),
        torch.from_numpy(np.searchsorted(segment, np.arange(num_segments + 1)).astype(np.int64)),
    )
