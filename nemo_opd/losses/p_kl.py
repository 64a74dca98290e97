"""Student projected onto the teacher's vocabulary, at each chunk's first position (methods.md §5.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.kernels.forms import CellMap
from nemo_opd.logits.blocks import local_parts
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import GradientSink, UnitRows, unit_cells
from nemo_opd.losses.arguments import check_compat, fixed_by
from nemo_opd.losses.cells import covered_columns
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs, OnCells
from nemo_opd.losses.chunk_merge import Merge, chunk_loss
from nemo_opd.losses.divergence import Divergence, compare_logits
from nemo_opd.losses.fused import fused, log_sum_exp, softmax, taken_once
from nemo_opd.losses.learned_projection import LearnedProjection
from nemo_opd.losses.sparse_projection import SparseProjection, project, pull_back
from nemo_opd.losses.support import partial_divergence, require_whole, split, with_tail_cell

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


@Loss
def p_kl(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix | LearnedProjection,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    merge: str | None = None,
    coverage_coef: float | None = None,
    vocab_topk: int | None = None,
    continuation_weight: float = 0.0,
    compat: str | None = None,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute τ² · Σ [divergence(q̂, p̂) − coverage_coef · log Σ p̃] over chunks / normalizer, and `kd` (methods.md §5.3).

    p̃ = Rᵀp at the row that predicts a chunk's first student token, q at the row that predicts its first teacher token;
    q̂ and p̂ are q and p̃ renormalised on the covered columns of R. vocab_topk: compare the covered columns with the
    largest teacher logits of this call, and all other covered columns as one cell; by default each column. merge: see
    `Merge`, by default "first"; "mean", for parity: p is the arithmetic and q the geometric mean over the rows of all
    tokens of a chunk. coverage_coef: by default 1. continuation_weight: factor of the `alm` term of chunks with several
    tokens on a side. A `LearnedProjection` as `projection` gets a gradient too. compat="nemo_rl": merge "mean", no
    coverage term, no shared cell; the vocab_topk columns are chosen over all teacher positions and normalised before
    the mean. Raises ConfigError for shapes, sizes or names that do not fit.
    """
    check_compat(compat, ("nemo_rl",))
    merging = Merge(fixed_by(compat, "merge", merge, "mean", "first"), arithmetic_student=True)
    coverage = fixed_by(compat, "coverage_coef", coverage_coef, 0.0, 1.0)
    if merging.kind == "observed":
        raise ConfigError("merge=observed: p_kl needs a distribution, which it does not give; use first or mean")
    if vocab_topk is not None and vocab_topk < 1:
        raise ConfigError(f"vocab_topk={vocab_topk} leaves no column to compare; give 1 or more, or None for all")
    if vocab_topk == 1 and compat == "nemo_rl":
        raise ConfigError(
            "vocab_topk=1 with compat=nemo_rl: one renormalised column is 1 on both sides, and nothing is learned; "
            "give a larger number, or leave compat out"
        )
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=temperature, projection=projection, **shared)
    if vocab_topk is not None:
        require_whole(inputs.teacher, f"vocab_topk={vocab_topk}", "it chooses columns by all logits of a microbatch")
    compare = Divergence(divergence, beta, mixed_weight)
    sizes = inputs.student_size, inputs.teacher_size
    if isinstance(projection, LearnedProjection):
        matrix, sparse = projection.start, projection.sparse(*sizes, inputs.device)
    else:
        matrix, sparse = projection, SparseProjection.of(projection, *sizes, inputs.device)
    cells = _Cells.of(inputs, None if compat == "nemo_rl" else merging, sparse.columns, vocab_topk)

    def unit_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        log_covered = sparse.log_project(student)
        uncovered = log_sum_exp(student) - log_sum_exp(log_covered)
        if inputs.is_truncated:
            log_t, log_rest = split(teacher)
            cells_with_rest = with_tail_cell(log_t.index_select(1, sparse.columns), log_covered, log_rest)
            return compare.of_logits(*cells_with_rest) + coverage * uncovered
        teacher = teacher.index_select(1, sparse.columns)
        return compare.of_logits(cells.take(teacher), cells.take(log_covered)) + coverage * uncovered

    def nemo_rl_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        return partial_divergence(compare, teacher, cells.take_single(sparse.log_project(student)).log_softmax(-1))

    def unit_loss_onto(student: UnitRows, teacher: UnitRows, part: slice, onto: GradientSink) -> Tensor:
        student = taken_once(student)
        log_covered, shares = project(student, sparse)
        value, log_sum, gradient = _compare_covered(teacher, log_covered, sparse.columns, compare, coverage)
        uncovered = _add_uncovered(student, gradient, shares, sparse, coverage, onto) - log_sum
        return value + coverage * uncovered.squeeze(1).to(value.dtype)

    if compat is not None:
        merging = replace(merging, teacher_columns=cells.take_single(sparse.columns.unsqueeze(0)).squeeze(0))

    def for_kernels() -> CellMap:
        return covered_columns(matrix, *sizes, inputs.device)

    has_closed_form = compat is None and cells.single is None and matrix is projection
    term = merging.term(
        inputs,
        unit_loss if compat is None else nemo_rl_loss,
        cells_per_unit=5 * sizes[0] + 3 * sizes[1] + 3 * sparse.num_entries + 12 * sparse.num_columns,
        compare_onto=unit_loss_onto if has_closed_form else None,
        on_cells=OnCells(compare, for_kernels, coverage) if has_closed_form else None,
    )
    if sparse.block.log_weight.requires_grad:
        term = replace(term, learned=sparse.block.log_weight)
    return chunk_loss(inputs, term, continuation_weight=continuation_weight)


@fused
def _compare_covered(
    teacher: UnitRows, log_covered: Tensor, columns: Tensor, divergence: Divergence, coverage: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the divergence [U], log Σ exp of the covered columns [U, 1], and a gradient for those columns [U, X].

    The gradient is the derivative of divergence − coverage · log Σ exp.
    """
    teacher_covered = teacher.gather().to(log_covered.dtype).index_select(1, columns)
    comparison = compare_logits(teacher_covered, log_covered, divergence)
    return comparison.value, comparison.log_sum, comparison.gradient.sub_(comparison.s, alpha=coverage)


@fused
def _add_uncovered(
    student: UnitRows,
    covered_gradient: Tensor,
    shares: Tensor,
    sparse: SparseProjection,
    coverage: float,
    onto: GradientSink,
) -> Tensor:
    """Pull a gradient of covered columns [U, X] back to the student's logits/τ and add it to `onto`.

    Returns log Σ exp of the logits/τ [U, 1].
    """
    p, log_sum = softmax.function(student.gather())
    onto.add(pull_back.function(covered_gradient, shares, sparse).add_(p, alpha=coverage))
    return log_sum


@dataclass(frozen=True, slots=True)
class _Cells:
    """Cells on which the X covered columns are compared."""

    single: Tensor | None
    """int64 [k]: columns with a cell to themselves, ascending, or None if all columns have one."""
    shared: Tensor | None
    """int64 [X − k]: columns that share one cell."""

    @staticmethod
    def of(inputs: ChunkInputs, merge: Merge | None, columns: Tensor, top_k: int | None) -> _Cells:
        """Choose the columns with the largest teacher logit in the rows that `merge` compares, or in all rows.

        Ties go to the lower column.
        """
        if top_k is None or top_k >= len(columns):
            return _Cells(None, None)
        num_texts, width, _ = inputs.teacher.shape
        rows = torch.arange(num_texts * width, device=inputs.device) if merge is None else merge.teacher_rows(inputs)
        order = _largest_logits(inputs, rows).index_select(0, columns).argsort(descending=True, stable=True)
        return _Cells(order[:top_k].sort().values, order[top_k:].sort().values)

    def take(self, log_mass: Tensor) -> Tensor:
        """Map log-masses of columns [U, X] to log-masses of cells, [U, k + 1] or [U, X]."""
        if self.single is None or self.shared is None:
            return log_mass
        shared_cell = log_sum_exp(log_mass.index_select(1, self.shared)).unsqueeze(1)
        return torch.cat([self.take_single(log_mass), shared_cell], -1)

    def take_single(self, columns: Tensor) -> Tensor:
        """Select the columns with a cell to themselves: [U, X] → [U, k] or [U, X]."""
        return columns if self.single is None else columns.index_select(1, self.single)


def _largest_logits(inputs: ChunkInputs, rows: Tensor) -> Tensor:
    """Return each column's largest logit, [W], over rows [R] of [B·T]; −inf without rows."""
    largest = torch.full((inputs.teacher_size,), -torch.inf, dtype=inputs.dtype, device=inputs.device)
    for part in local_parts(inputs.teacher, unit_cells(len(rows), 2 * inputs.teacher_size)):
        logits = inputs.teacher.read(rows[part], inputs.teacher_size).to(inputs.dtype)
        largest = torch.cat([logits, largest.unsqueeze(0)]).amax(0)
    return inputs.teacher.reduce(largest, dist.ReduceOp.MAX)
