"""Which positions of an aligned chunk a loss compares, and how several become one (METHODS §5)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.losses.chunk_loss import ChunkInputs, Compare, first_position_sum
from nemo_opd.losses.chunk_positions import ChunkPositions
from nemo_opd.losses.chunked import UnitSum, unit_cells, unit_parts
from nemo_opd.losses.reduction import reduced
from nemo_opd.types import LossOutput

MERGES = ("first", "mean")
LIVE_COPIES = 5
"""Tensors of the size of a chunk's positions alive before the positions of a unit are one."""


@dataclass(frozen=True, slots=True)
class Merge:
    """How a loss merges a chunk."""

    kind: str
    """One of MERGES. first: the chunk's first position on either side. mean: all its positions, for parity."""
    arithmetic_student: bool = False
    """mean: of the student's probabilities instead of their logarithms. The teacher's mean is geometric."""

    def __post_init__(self) -> None:
        if self.kind not in MERGES:
            raise ConfigError(f"merge={self.kind!r}: there is no such merge; choose from {', '.join(MERGES)}")

    def sum(self, inputs: ChunkInputs, compare: Compare, *, cells_per_unit: int, chunk_size: int | None) -> UnitSum:
        """`first_position_sum`, or the same of means: compare then takes [u, V] and [u, W] of log-means."""
        sum_of = first_position_sum if self.kind == "first" else self._mean_sum
        return sum_of(inputs, compare, cells_per_unit=cells_per_unit, chunk_size=chunk_size)

    def loss(
        self,
        inputs: ChunkInputs,
        compare: Compare,
        *,
        cells_per_unit: int,
        normalizer: float | None,
        chunk_size: int | None,
    ) -> LossOutput:
        """`sum` / normalizer, and the metric `kd` in nats per unit."""
        units = self.sum(inputs, compare, cells_per_unit=cells_per_unit, chunk_size=chunk_size)
        return reduced("kd", units, len(inputs.units), normalizer)

    def teacher_rows(self, inputs: ChunkInputs) -> Tensor:
        """Rows of [B·T] that are compared: int64 [R]."""
        if self.kind == "first":
            return inputs.units.teacher_rows
        return ChunkPositions.of(inputs.units.teacher_rows, inputs.units.teacher_lengths).rows

    def _mean_sum(
        self, inputs: ChunkInputs, compare: Compare, *, cells_per_unit: int, chunk_size: int | None
    ) -> UnitSum:
        units, temperature = inputs.units, inputs.temperature
        student = ChunkPositions.of(units.student_rows, units.student_lengths)
        teacher = ChunkPositions.of(units.teacher_rows, units.teacher_lengths)

        def loss_of(student_logits: Tensor, part: slice) -> Tensor:
            teacher_logits = inputs.teacher_at(teacher.rows_of(part))
            log_q = teacher.mean((teacher_logits / temperature).log_softmax(-1), part)
            log_p = (student_logits / temperature).log_softmax(-1)
            if not self.arithmetic_student:
                return compare(student.mean(log_p, part), log_q, part)
            log_length = units.student_lengths[part].to(log_p.dtype).log().unsqueeze(1)
            return compare(student.log_sum_exp(log_p, part) - log_length, log_q, part)

        of_student = (student.offsets, LIVE_COPIES * inputs.student_size)
        of_teacher = (teacher.offsets, LIVE_COPIES * inputs.teacher_size)
        cells = unit_cells(len(units), cells_per_unit, of_student, of_teacher)
        parts = unit_parts(inputs.student, cells, chunk_size)
        return inputs.sum_of(student.rows_of, loss_of, parts).times(temperature**2)
