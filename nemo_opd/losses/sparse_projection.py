"""A projection matrix on a device, ordered for sums over its columns and over its rows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.errors import ProjectionError
from nemo_opd.logits.term import Onto, UnitRows
from nemo_opd.losses.fused import fused
from nemo_opd.losses.made_once import made_once
from nemo_opd.losses.segments import Segments

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


@dataclass(frozen=True, slots=True)
class _Block:
    """Rest of R without its pairs: entries whose row or column has others, or whose weight is not 1.

    Entries are cells of the layout of their columns, M of them.
    """

    columns: Tensor
    """int64 [Y]: indices into the covered columns, in the order of `by_column`."""
    tokens: Tensor
    """int64 [Z]: student tokens, in the order of `by_token`; those that reach nothing are among them."""
    student: Tensor
    """int64 [M]: student token of a cell; any where it is padding."""
    entry: Tensor
    """int64 [M]: its place among the entries that the matrix was made from; −1 where it is padding."""
    log_weight: Tensor
    """float64 [M]: −inf where it is padding. Where it is learned, it has a gradient."""
    by_column: Segments
    by_token: Segments
    """Its entries are cells of `by_column`; its padding, too, is that of `by_column`."""

    def to(self, device: torch.device) -> _Block:
        return _Block(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class SparseProjection:
    """R with its covered columns only, X of them: those that some row reaches.

    Most tokens of two vocabularies are pairs: the one entry of its row is the one entry of its column and has weight 1.
    A pair costs a copy; sums are formed in the block that remains.
    """

    columns: Tensor
    """int64 [X]: covered teacher tokens, ascending."""
    source: Tensor
    """int64 [X]: the student token that a column is a pair with; any for the columns of the block."""
    target: Tensor
    """int64 [V]: the index into `columns` that a student token is a pair with; any for the tokens of the block."""
    block: _Block

    @staticmethod
    def of(
        projection: ProjectionMatrix, student_vocab_size: int, teacher_vocab_size: int, device: torch.device
    ) -> SparseProjection:
        """Cut the matrix to the given vocabulary sizes on `device`, made once as long as the matrix lives.

        Raises ProjectionError where no entry is left.
        """
        indices, weights = projection.indices, projection.weights
        sizes = student_vocab_size, teacher_vocab_size
        return made_once(
            lambda: SparseProjection.of_entries(*entries_within(indices, weights, *sizes), sizes[0]).to(device),
            (indices, weights),
            SparseProjection,
            *sizes,
            device,
        )

    @staticmethod
    def of_entries(
        student: NDArray[np.int64], column: NDArray[np.int64], weight: NDArray[np.float64], student_vocab_size: int
    ) -> SparseProjection:
        """Make it from entries [nnz]: student token, teacher token or cell, weight above 0."""
        columns, column = np.unique(column, return_inverse=True)
        per_token, per_column = np.bincount(student, minlength=student_vocab_size), np.bincount(column)
        is_pair = (per_token[student] == 1) & (per_column[column] == 1) & (weight == 1)
        source, target = np.zeros(len(columns), np.int64), np.zeros(student_vocab_size, np.int64)
        source[column], target[student] = student, column
        block = _block(student, column, weight, ~is_pair, np.setdiff1d(np.arange(len(target)), student[is_pair]))
        return SparseProjection(
            torch.from_numpy(columns.astype(np.int64)), torch.from_numpy(source), torch.from_numpy(target), block
        )

    @property
    def num_columns(self) -> int:
        return len(self.columns)

    @property
    def num_entries(self) -> int:
        """Entries that sums are formed of."""
        return len(self.block.student)

    def to(self, device: torch.device) -> SparseProjection:
        return SparseProjection(*(getattr(self, field.name).to(device) for field in fields(self)))

    def log_project(self, log_mass: Tensor) -> Tensor:
        """Compute log(Rᵀ exp(log_mass)) on the covered columns in log space: [U, V] → [U, X] (methods.md §5.3).

        Sums run in a fixed order, so repeated calls agree to the bit on every device.
        """
        return _LogProject.apply(log_mass, self.block.log_weight, self)


class _LogProject(torch.autograd.Function):
    """A copy of pairs and, over it, a log-sum-exp over the entries of each column of the block."""

    @staticmethod
    def forward(ctx: Any, log_mass: Tensor, log_weight: Tensor, sparse: SparseProjection) -> Tensor:
        log_covered, shares = project(UnitRows(log_mass, None), sparse, any(ctx.needs_input_grad))
        ctx.save_for_backward(shares)
        ctx.sparse = sparse
        return log_covered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (shares,) = ctx.saved_tensors
        of_weights = _sum_of_cells(grad_output, shares, ctx.sparse) if ctx.needs_input_grad[1] else None
        return pull_back(grad_output, shares, ctx.sparse), of_weights, None


@fused
def project(rows: UnitRows, sparse: SparseProjection, has_shares: bool = True) -> tuple[Tensor, Tensor]:
    """Return log(Rᵀ exp(log-mass)) [U, X], and the share of each cell of the block in its column [U, M], or [U, 0]."""
    log_mass, block = rows.taken(), sparse.block
    cells = log_mass.index_select(1, block.student).add_(block.log_weight.to(log_mass.dtype))
    # A column whose cells are all −inf would give −inf − −inf.
    peaks = block.by_column.max(cells).clamp_(min=torch.finfo(cells.dtype).min)
    for own, peak in block.by_column.each(cells, peaks):
        own.sub_(peak.unsqueeze(1))
    totals = block.by_column.sum(cells.exp_())
    # The sum is 1 at least, since the peak is in it, or 0 where all are −inf.
    for own, total in block.by_column.each(cells, totals.clamp(min=1)) if has_shares else ():
        own.div_(total.unsqueeze(1))
    covered = log_mass.index_select(1, sparse.source).index_copy_(1, block.columns, totals.log_().add_(peaks))
    return covered, cells if has_shares else cells[:, :0]


@fused
def pull_back(gradient: Tensor, shares: Tensor, sparse: SparseProjection) -> Tensor:
    """Turn the gradient with respect to log-mass of columns [U, X] into that of tokens [U, V]."""
    block = sparse.block
    of_cells = _of_cells(gradient, shares, block)
    of_tokens = block.by_token.sum(of_cells.index_select(1, block.by_token.entries))
    return gradient.index_select(1, sparse.target).index_copy_(1, block.tokens, of_tokens)


@fused
def _sum_of_cells(gradient: Tensor, shares: Tensor, sparse: SparseProjection) -> Tensor:
    """Turn the gradient with respect to log-mass of columns [U, X] into that of the log-weights, float64 [M]."""
    return _of_cells(gradient, shares, sparse.block).sum(0, dtype=torch.float64)


def _of_cells(gradient: Tensor, shares: Tensor, block: _Block) -> Tensor:
    """Multiply the shares of cells in their columns [U, M] with the gradient of the columns [U, X]."""
    of_cells = shares.clone()
    for own, of_column in block.by_column.each(of_cells, gradient.index_select(1, block.columns)):
        own.mul_(of_column.unsqueeze(1))
    return of_cells


@fused
def add_pulled_back(gradient: Tensor, shares: Tensor, sparse: SparseProjection, onto: Onto) -> None:
    """Add what `pull_back` returns."""
    onto.add(pull_back.function(gradient, shares, sparse))


def entries_within(
    indices: np.ndarray, weights: np.ndarray, student_vocab_size: int, teacher_vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the entries [nnz] of a matrix within the given sizes: student token, teacher token, weight above 0.

    Raises ProjectionError where there is none.
    """
    student, slot = slots_within(indices, weights, student_vocab_size, teacher_vocab_size)
    if not len(student):
        raise ProjectionError(
            f"the projection has no entry within {student_vocab_size} student and {teacher_vocab_size} teacher tokens; "
            "it belongs to another pair of tokenizers, or they have nothing in common"
        )
    return student, indices[student, slot].astype(np.int64), weights[student, slot].astype(np.float64)


def slots_within(
    indices: np.ndarray, weights: np.ndarray, student_vocab_size: int, teacher_vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row and the slot of the entries that `entries_within` returns, in its order."""
    indices, weights = indices[:student_vocab_size], weights[:student_vocab_size]
    student, slot = np.nonzero((indices >= 0) & (indices < teacher_vocab_size) & (weights > 0))
    return student, slot


def _block(
    student: NDArray[np.int64],
    column: NDArray[np.int64],
    weight: NDArray[np.float64],
    is_inside: NDArray[np.bool_],
    tokens: NDArray[np.int64],
) -> _Block:
    """Select the entries inside the block; `tokens`: its rows, ascending."""
    entries = np.flatnonzero(is_inside)
    entries = entries[np.argsort(column[entries], kind="stable")]
    columns, first = np.unique(column[entries], return_index=True)
    by_column = Segments.of(np.append(first, len(entries)))
    cells = by_column.entries.numpy()
    entry = np.append(entries, -1)[cells]
    student, weight = np.append(student, -1)[entry], np.append(weight, 0)[entry]
    of_tokens = np.flatnonzero(student >= 0)
    of_tokens = of_tokens[np.argsort(student[of_tokens], kind="stable")]
    by_token = Segments.of(np.append(np.searchsorted(student[of_tokens], tokens), len(of_tokens)))
    by_token = replace(by_token, entries=torch.from_numpy(np.append(of_tokens, len(cells) - 1))[by_token.entries])
    return _Block(
        torch.from_numpy(columns)[by_column.order],
        torch.from_numpy(tokens)[by_token.order],
        torch.from_numpy(np.maximum(student, 0)),
        torch.from_numpy(entry),
        torch.from_numpy(weight).log(),
        by_column,
        by_token,
    )
