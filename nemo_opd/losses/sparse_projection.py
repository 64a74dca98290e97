"""A projection on a device, laid out for sums over its columns and over its rows, and its one-to-one pairs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.errors import ProjectionError
from nemo_opd.logits.term import GradientSink, UnitRows
from nemo_opd.losses.fused import fused

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Ids = NDArray[np.int64]
_EXACT_LENGTH = 4
"""Longest segment length without padding; longer segments are padded to a power of two."""
_RELAXED_WEIGHT = 0.6
"""Minimum weight of a relaxed pair. Above ½, so that a row has at most one pair."""


def cached_while_alive(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Cache a function of arrays and matrices, compared by identity, and of numbers, names, devices and dtypes.

    A result is dropped with the first of its arrays or matrices.
    """
    results: dict[tuple[object, ...], _Result] = {}

    @wraps(function)
    def cached(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        assert not kwargs, "arguments are compared by position"
        owners = [value for value in args if not isinstance(value, int | str | torch.device | torch.dtype)]
        key = tuple(value if isinstance(value, int | str | torch.device | torch.dtype) else id(value) for value in args)
        if key not in results:
            results[key] = function(*args, **kwargs)
            for owner in owners:  # An id may be reused once its owner is gone.
                weakref.finalize(owner, results.pop, key, None)
        return results[key]

    return cached


@dataclass(frozen=True, slots=True)
class SparseProjection:
    """R restricted to its X covered columns, which are reached by some row.

    Most entries are pairs: the only entry of their row and of their column, with weight 1. Pairs are copied; sums are
    formed only in the remaining block.
    """

    columns: Tensor
    """int64 [X]: covered teacher tokens, ascending."""
    source: Tensor
    """int64 [X]: each column's paired student token; arbitrary for columns of the block."""
    target: Tensor
    """int64 [V]: each student token's paired index into `columns`; arbitrary for tokens of the block."""
    block: _Block

    @staticmethod
    @cached_while_alive
    def of(
        projection: ProjectionMatrix, student_vocab_size: int, teacher_vocab_size: int, device: torch.device
    ) -> SparseProjection:
        """Cut the matrix to the given vocabulary sizes on `device`; cached while the matrix lives.

        Raises ProjectionError if no entry remains.
        """
        entries = entries_within(projection, student_vocab_size, teacher_vocab_size)
        return SparseProjection.of_entries(*entries, student_vocab_size).to(device)

    @staticmethod
    def of_entries(
        student: NDArray[np.int64], column: NDArray[np.int64], weight: NDArray[np.float64], student_vocab_size: int
    ) -> SparseProjection:
        """Build a projection from entries [nnz]: student token, teacher token or cell, weight above 0."""
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
        """Number of entries, with padding, over which sums run."""
        return len(self.block.student)

    def to(self, device: torch.device) -> SparseProjection:
        return SparseProjection(*(getattr(self, field.name).to(device) for field in fields(self)))

    def log_project(self, log_mass: Tensor) -> Tensor:
        """Compute log(Rᵀ exp(log_mass)) on the covered columns in log space: [U, V] → [U, X] (methods.md §5.3).

        Sums run in a fixed order, so repeated calls agree bitwise on every device.
        """
        return _LogProject.apply(log_mass, self.block.log_weight, self)


@dataclass(frozen=True, slots=True)
class _Block:
    """Entries of R that are not pairs, since their row or column has several entries or their weight is not 1.

    Entries are M cells, laid out by column.
    """

    columns: Tensor
    """int64 [Y]: indices into the covered columns, in `by_column` order."""
    tokens: Tensor
    """int64 [Z]: student tokens, in `by_token` order, including tokens without entries."""
    student: Tensor
    """int64 [M]: each cell's student token; arbitrary for padding."""
    entry: Tensor
    """int64 [M]: each cell's index into the entries that the matrix was built from, −1 for padding."""
    log_weight: Tensor
    """float64 [M]: −inf for padding. Has a gradient if weights are learned."""
    by_column: Segments
    by_token: Segments
    """Its entries are cells of `by_column`; its padding is the last of these cells, which is padding too."""

    def to(self, device: torch.device) -> _Block:
        return _Block(*(getattr(self, field.name).to(device) for field in fields(self)))


def _block(
    student: NDArray[np.int64],
    column: NDArray[np.int64],
    weight: NDArray[np.float64],
    is_inside: NDArray[np.bool_],
    tokens: NDArray[np.int64],
) -> _Block:
    """Build the block from the entries with `is_inside`. tokens: the block's rows, ascending."""
    entries = np.flatnonzero(is_inside)
    entries = entries[np.argsort(column[entries], kind="stable")]
    columns, first = np.unique(column[entries], return_index=True)
    by_column = Segments.of(np.append(first, len(entries)))
    cells = by_column.entries.numpy()
    entry = np.append(entries, -1)[cells]
    student, weight = np.append(student, -1)[entry], np.append(weight, 0)[entry]
    token_cells = np.flatnonzero(student >= 0)
    token_cells = token_cells[np.argsort(student[token_cells], kind="stable")]
    by_token = Segments.of(np.append(np.searchsorted(student[token_cells], tokens), len(token_cells)))
    by_token = replace(by_token, entries=torch.from_numpy(np.append(token_cells, len(cells) - 1))[by_token.entries])
    return _Block(
        torch.from_numpy(columns)[by_column.order],
        torch.from_numpy(tokens)[by_token.order],
        torch.from_numpy(np.maximum(student, 0)),
        torch.from_numpy(entry),
        torch.from_numpy(weight).log(),
        by_column,
        by_token,
    )


class _LogProject(torch.autograd.Function):
    """Copy of pairs, and log-sum-exp over each column's entries in the block."""

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
        weight_gradient = _weight_gradient(grad_output, shares, ctx.sparse) if ctx.needs_input_grad[1] else None
        return pull_back(grad_output, shares, ctx.sparse), weight_gradient, None


@fused
def project(rows: UnitRows, sparse: SparseProjection, has_shares: bool = True) -> tuple[Tensor, Tensor]:
    """Return log(Rᵀ exp(log-mass)) [U, X], and each block cell's share of its column [U, M], or [U, 0]."""
    log_mass, block = rows.gather(), sparse.block
    cells = log_mass.index_select(1, block.student).add_(block.log_weight.to(log_mass.dtype))
    # A column whose cells are all −inf would give −inf − −inf.
    peaks = block.by_column.max(cells).clamp_(min=torch.finfo(cells.dtype).min)
    for group, peak in block.by_column.each(cells, peaks):
        group.sub_(peak.unsqueeze(1))
    totals = block.by_column.sum(cells.exp_())
    # A sum includes its peak and is at least 1, or 0 if all cells are −inf.
    for group, total in block.by_column.each(cells, totals.clamp(min=1)) if has_shares else ():
        group.div_(total.unsqueeze(1))
    covered = log_mass.index_select(1, sparse.source).index_copy_(1, block.columns, totals.log_().add_(peaks))
    return covered, cells if has_shares else cells[:, :0]


@fused
def pull_back(gradient: Tensor, shares: Tensor, sparse: SparseProjection) -> Tensor:
    """Turn a gradient for log-masses of columns [U, X] into a gradient for log-masses of tokens [U, V]."""
    block = sparse.block
    cell_gradient = _cell_gradient(gradient, shares, block)
    token_gradient = block.by_token.sum(cell_gradient.index_select(1, block.by_token.entries))
    return gradient.index_select(1, sparse.target).index_copy_(1, block.tokens, token_gradient)


@fused
def add_pulled_back(gradient: Tensor, shares: Tensor, sparse: SparseProjection, onto: GradientSink) -> None:
    """Add the result of `pull_back` to `onto`."""
    onto.add(pull_back.function(gradient, shares, sparse))


@fused
def _weight_gradient(gradient: Tensor, shares: Tensor, sparse: SparseProjection) -> Tensor:
    """Turn a gradient for log-masses of columns [U, X] into a gradient for the log-weights, float64 [M]."""
    return _cell_gradient(gradient, shares, sparse.block).sum(0, dtype=torch.float64)


def _cell_gradient(gradient: Tensor, shares: Tensor, block: _Block) -> Tensor:
    """Multiply cells' shares of their columns [U, M] by the gradient of the columns [U, X]: [U, M]."""
    cells = shares.clone()
    for group, column_gradient in block.by_column.each(cells, gradient.index_select(1, block.columns)):
        group.mul_(column_gradient.unsqueeze(1))
    return cells


def entries_within(
    projection: ProjectionMatrix, student_vocab_size: int, teacher_vocab_size: int
) -> tuple[_Ids, _Ids, NDArray[np.float64]]:
    """Return the entries [nnz] of a matrix within the given sizes: student token, teacher token, weight above 0.

    Raises ProjectionError if there are none.
    """
    student, slot = slots_within(projection, student_vocab_size, teacher_vocab_size)
    if not len(student):
        raise ProjectionError(
            f"the projection has no entry within {student_vocab_size} student and {teacher_vocab_size} teacher tokens; "
            "it belongs to another pair of tokenizers, or they have nothing in common"
        )
    entry = student, slot
    return student, projection.indices[entry].astype(np.int64), projection.weights[entry].astype(np.float64)


def slots_within(projection: ProjectionMatrix, student_vocab_size: int, teacher_vocab_size: int) -> tuple[_Ids, _Ids]:
    """Return row and slot of each entry of `entries_within`, in the same order."""
    indices, weights = projection.indices[:student_vocab_size], projection.weights[:student_vocab_size]
    student, slot = np.nonzero((indices >= 0) & (indices < teacher_vocab_size) & (weights > 0))
    return student, slot


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

    def each(self, cells: Tensor, segment_values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return views of cells [U, M] and segments [U, Y] per group: [U, length, number] and [U, number]."""
        numbers = [number for _, number in self.groups]
        return list(zip(self._groups(cells), segment_values.split(numbers, 1), strict=True))

    def max(self, cells: Tensor) -> Tensor:
        """Take the maximum of each segment: [U, M] → [U, Y]."""
        return torch.cat([cells[:, :0], *(group.amax(1) for group in self._groups(cells))], 1)

    def sum(self, cells: Tensor) -> Tensor:
        """Sum each segment, including its padding: [U, M] → [U, Y]."""
        return torch.cat([cells[:, :0], *(group.sum(1) for group in self._groups(cells))], 1)

    def _groups(self, cells: Tensor) -> list[Tensor]:
        """Return views of cells [U, M] per group: [U, length, number]. No generator: PyTorch 2.14 compiles none."""
        views, cell = [], 0
        for length, number in self.groups:
            views.append(cells.narrow(1, cell, length * number).unflatten(1, (length, number)))
            cell += length * number
        return views


@dataclass(frozen=True, slots=True)
class TokenPairs:
    """X one-to-one pairs of student and teacher tokens in order of student id, and the unpaired tokens."""

    student: Tensor
    """int64 [X], ascending."""
    teacher: Tensor
    """int64 [X]: the partner of each student token."""
    student_rest: Tensor
    """int64 [V − X], ascending: unpaired student tokens."""
    teacher_rest: Tensor
    """int64 [W − X], ascending: unpaired teacher tokens."""
    partner: Tensor
    """int64 [V]: each student token's teacher token, −1 if unpaired."""
    place: Tensor
    """int64 [V]: the index of each student token's pair, −1 if unpaired."""

    @staticmethod
    @cached_while_alive
    def exact(
        projection: ProjectionMatrix, student_vocab_size: int, teacher_vocab_size: int, device: torch.device
    ) -> TokenPairs:
        """Pair the shared vocabulary within the given sizes; cached while the matrix lives (methods.md §2.1).

        Raises ProjectionError if no pair remains.
        """
        sizes = student_vocab_size, teacher_vocab_size
        return _build_pairs(*pairs_within(projection, *sizes), *sizes).to(device)

    @staticmethod
    @cached_while_alive
    def relaxed(
        projection: ProjectionMatrix, student_vocab_size: int, teacher_vocab_size: int, device: torch.device
    ) -> TokenPairs:
        """Pair each student token with its teacher token of weight ≥ _RELAXED_WEIGHT (methods.md §5.5).

        If several students claim a teacher token, an exact row wins, then the higher weight, then the lower id. Cached
        while the matrix lives. Raises ProjectionError if no pair remains within the given sizes.
        """
        sizes = student_vocab_size, teacher_vocab_size
        return _build_pairs(*_relaxed(projection, *sizes), *sizes).to(device)

    def __len__(self) -> int:
        return len(self.student)

    def to(self, device: torch.device) -> TokenPairs:
        return TokenPairs(*(getattr(self, field.name).to(device) for field in fields(self)))


def _build_pairs(student: _Ids, teacher: _Ids, students: int, teachers: int) -> TokenPairs:
    if not len(student):
        raise ProjectionError(
            f"the projection has no matching tokens within {students} student and {teachers} teacher tokens; it "
            "belongs to another pair of tokenizers, marks no row as exact, or they have nothing in common: build it "
            "again, or use p_kl or uld"
        )
    partner, place = np.full(students, -1), np.full(students, -1)
    partner[student], place[student] = teacher, np.arange(len(student))
    student_rest, teacher_rest = np.setdiff1d(np.arange(students), student), np.setdiff1d(np.arange(teachers), teacher)
    sides = (student, teacher, student_rest, teacher_rest, partner, place)
    return TokenPairs(*(torch.from_numpy(ids.astype(np.int64)) for ids in sides))


def pairs_within(projection: ProjectionMatrix, students: int, teachers: int) -> tuple[_Ids, _Ids]:
    """Return both sides' ids of the shared vocabulary within the given sizes, [X] each, in order of student id."""
    student, teacher = projection.shared_pairs.astype(np.int64).T
    is_within = (student < students) & (teacher < teachers)
    return student[is_within], teacher[is_within]


def _relaxed(projection: ProjectionMatrix, students: int, teachers: int) -> tuple[_Ids, _Ids]:
    near = (projection.indices < teachers) & (projection.weights >= _RELAXED_WEIGHT)
    student, slot = np.nonzero(near[:students])
    teacher = projection.indices[student, slot].astype(np.int64)
    order = np.lexsort((student, -projection.weights[student, slot], ~projection.exact[student]))
    _, first = np.unique(teacher[order], return_index=True)
    winner = np.sort(order[first])
    return student[winner], teacher[winner]
