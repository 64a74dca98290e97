"""What the cross-tokenizer losses share: their arguments, and a loss of the chunks' first positions (METHODS §5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_opd.losses.arguments import check_positions, check_same_length, check_temperature, own_columns
from nemo_opd.losses.chunked import chunked_sum, compute_dtype, equal_parts
from nemo_opd.losses.reduction import ChunkUnits, chunk_units, reduced
from nemo_opd.types import LossOutput

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

Compare = Callable[[Tensor, Tensor, slice], Tensor]
"""(student logits/τ [u, V], teacher logits/τ [u, W], which units they are) → the loss of each unit, [u].

Logits are those of the chunks' first positions, cut to the vocabularies, in the compute dtype; the teacher's carry no
gradient.
"""


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """Arguments of a cross-tokenizer loss, checked."""

    student_logits: Tensor
    """[B, S, ≥ V], unshifted."""
    teacher_logits: Tensor
    """[B, T, ≥ W], unshifted; detached."""
    student_ids: Tensor
    """[B, S]"""
    teacher_ids: Tensor
    """[B, T]"""
    units: ChunkUnits
    student_size: int
    """V: leading columns of the student's head that are its vocabulary."""
    teacher_size: int
    """W"""
    temperature: float

    @classmethod
    def of(
        cls,
        student_logits: Tensor,
        teacher_logits: Tensor,
        *,
        student_ids: Tensor,
        teacher_ids: Tensor,
        student_chunk_id: Tensor,
        teacher_chunk_id: Tensor,
        temperature: float,
        projection: ProjectionMatrix | None = None,
        student_vocab_size: int | None = None,
        teacher_vocab_size: int | None = None,
    ) -> ChunkInputs:
        """Chunk ids are −1 or non-decreasing. Sizes default to the projection's, else the narrower head (METHODS §5).

        Raises ConfigError for shapes or sizes that do not fit, or a temperature that is not above 0.
        """
        check_temperature(temperature)
        check_positions(student_logits, student_ids=student_ids, student_chunk_id=student_chunk_id)
        check_positions(teacher_logits, teacher_ids=teacher_ids, teacher_chunk_id=teacher_chunk_id)
        check_same_length(student_logits=student_logits, teacher_logits=teacher_logits)
        narrower = min(student_logits.shape[-1], teacher_logits.shape[-1])
        student_default = narrower if projection is None else projection.student_vocab_size
        teacher_default = narrower if projection is None else projection.teacher_vocab_size
        return cls(
            student_logits,
            teacher_logits.detach(),
            student_ids,
            teacher_ids,
            chunk_units(student_chunk_id, teacher_chunk_id),
            own_columns("student_vocab_size", student_vocab_size, student_default, student_logits),
            own_columns("teacher_vocab_size", teacher_vocab_size, teacher_default, teacher_logits),
            temperature,
        )

    def teacher_rows(self, part: slice) -> Tensor:
        """Teacher logits [u, W] at the first positions of units[part], in their own dtype."""
        return self.teacher_at(self.units.teacher_rows[part])

    def teacher_at(self, rows: Tensor) -> Tensor:
        """Teacher logits [R, W] at indices [R] into [B·T], in their own dtype."""
        return self.teacher_logits.flatten(0, 1).narrow(1, 0, self.teacher_size).index_select(0, rows)


def first_position_loss(
    inputs: ChunkInputs, compare: Compare, *, cells_per_unit: int, normalizer: float | None, chunk_size: int | None
) -> LossOutput:
    """τ² · Σ compare over units / normalizer (METHODS §5, §7), and the metric `kd` in nats per unit.

    cells_per_unit: fp32 numbers that a unit takes at the peak of a chunk, both sides' logits included. normalizer:
    units of the global batch, by default of this call. chunk_size: units computed at a time, by default what fits a
    byte budget; raises ConfigError below 1.
    """
    temperature, dtype = inputs.temperature, compute_dtype(inputs.student_logits)

    def loss_of(student: Tensor, part: slice) -> Tensor:
        teacher = inputs.teacher_rows(part).to(dtype)
        return compare(student / temperature, teacher / temperature, part).sum()

    rows = inputs.units.student_rows
    parts = equal_parts(rows, cells_per_unit, chunk_size)
    total = chunked_sum(inputs.student_logits, rows, loss_of, width=inputs.student_size, parts=parts)
    return reduced("kd", total * temperature**2, len(rows), normalizer)


def log_rest(others: Tensor) -> Tensor | None:
    """log Σ exp of the columns beyond the cells: [U, Y] → [U, 1]; None for Y = 0 (METHODS §3).

    A sum over those columns, since 1 − Σ of the cells has no digit left where they hold nearly all mass. Where all are
    −inf it is about the lowest finite number, whose gradient is 0 and not the NaN of −inf.
    """
    if not others.shape[-1]:
        return None
    return others.clamp(min=torch.finfo(others.dtype).min).logsumexp(-1, keepdim=True)
