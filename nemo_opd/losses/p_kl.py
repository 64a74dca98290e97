"""The student, projected onto the teacher's vocabulary, at the first position of each aligned chunk (METHODS §5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.losses.arguments import check_positions, check_same_length, check_temperature, own_columns
from nemo_opd.losses.chunked import chunked_sum, equal_parts
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.reduction import chunk_units, reduced
from nemo_opd.losses.sparse_projection import SparseProjection
from nemo_opd.types import LossOutput

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

MERGES = ("first",)


def p_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    projection: ProjectionMatrix,
    student_ids: Tensor,
    teacher_ids: Tensor,
    student_chunk_id: Tensor,
    teacher_chunk_id: Tensor,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    merge: str = "first",
    coverage_coef: float = 1.0,
    normalizer: float | None = None,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> LossOutput:
    """τ² · Σ [divergence(q̂, p̂) − coverage_coef · log Σ p̃] over chunks / normalizer (METHODS §5), and the metric `kd`.

    p̃ = Rᵀp at the row before a chunk's first student token, q at the row before its first teacher token; q̂ and p̂ are q
    and p̃ renormalised on the covered columns of R. Unshifted logits [B, S, V] and [B, T, W]; ids and chunk ids [B, S]
    and [B, T], chunk ids −1 or non-decreasing; a chunk with token 0 of either side is no unit. Vocabulary sizes default
    to the projection's. normalizer: units of the global batch, by default of this call. chunk_size: units computed at
    a time, by default what fits a byte budget. Raises ConfigError for shapes, sizes or names that do not fit.
    """
    check_temperature(temperature)
    if merge not in MERGES:
        raise ConfigError(f"merge={merge!r}: p_kl has no such merge; choose from {', '.join(MERGES)}")
    check_positions(student_logits, student_ids=student_ids, student_chunk_id=student_chunk_id)
    check_positions(teacher_logits, teacher_ids=teacher_ids, teacher_chunk_id=teacher_chunk_id)
    check_same_length(student_logits=student_logits, teacher_logits=teacher_logits)
    student_size = own_columns("student_vocab_size", student_vocab_size, projection.student_vocab_size, student_logits)
    teacher_size = own_columns("teacher_vocab_size", teacher_vocab_size, projection.teacher_vocab_size, teacher_logits)
    compare = Divergence(divergence, beta, mixed_weight)
    sparse = SparseProjection.of(projection, student_size, teacher_size, student_logits.device)
    units = chunk_units(student_chunk_id, teacher_chunk_id)
    teacher_rows = teacher_logits.detach().flatten(0, 1)

    def loss_of(student: Tensor, part: slice) -> Tensor:
        log_mass = student / temperature
        log_covered = sparse.log_project(log_mass)
        teacher = teacher_rows.index_select(0, units.teacher_rows[part]).index_select(1, sparse.columns)
        log_q = (teacher.to(student.dtype) / temperature).log_softmax(-1)
        uncovered = log_mass.logsumexp(-1) - log_covered.logsumexp(-1)
        return (compare(log_q, log_covered.log_softmax(-1)) + coverage_coef * uncovered).sum()

    parts = equal_parts(units.student_rows, _cells_per_unit(sparse, student_size), chunk_size)
    total = chunked_sum(student_logits, units.student_rows, loss_of, width=student_size, parts=parts)
    return reduced("kd", total * temperature**2, len(units.student_rows), normalizer)


def _cells_per_unit(sparse: SparseProjection, student_size: int) -> int:
    """fp32 numbers alive per unit at the peak of a chunk."""
    return 5 * student_size + 3 * sparse.num_entries + 10 * sparse.num_columns
