"""Which positions of an aligned chunk a loss compares, and how several become one (METHODS §5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.losses.chunk_loss import ChunkInputs, Compare, first_position_loss
from nemo_opd.losses.chunked import chunked_sum, compute_dtype, equal_parts
from nemo_opd.losses.reduction import reduced
from nemo_opd.types import LossOutput

MERGES = ("first", "mean")


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

    def loss(
        self,
        inputs: ChunkInputs,
        compare: Compare,
        *,
        cells_per_unit: int,
        normalizer: float | None,
        chunk_size: int | None,
    ) -> LossOutput:
        """`first_position_loss`, or the same of means: compare then takes [u, V] and [u, W] of log-means."""
        loss_of = first_position_loss if self.kind == "first" else self._mean_loss
        return loss_of(inputs, compare, cells_per_unit=cells_per_unit, normalizer=normalizer, chunk_size=chunk_size)

    def teacher_rows(self, inputs: ChunkInputs) -> Tensor:
        """Rows of [B·T] that are compared: int64 [R]."""
        if self.kind == "first":
            return inputs.units.teacher_rows
        return _Positions.of(inputs.units.teacher_rows, inputs.units.teacher_lengths).rows

    def _mean_loss(
        self,
        inputs: ChunkInputs,
        compare: Compare,
        *,
        cells_per_unit: int,
        normalizer: float | None,
        chunk_size: int | None,
    ) -> LossOutput:
        units, temperature = inputs.units, inputs.temperature
        student = _Positions.of(units.student_rows, units.student_lengths)
        teacher = _Positions.of(units.teacher_rows, units.teacher_lengths)
        dtype = compute_dtype(inputs.student_logits)
        cells = cells_per_unit + student.extra_cells(inputs.student_size) + teacher.extra_cells(inputs.teacher_size)
        parts = equal_parts(units.student_rows, cells, chunk_size)
        units_of = {student.span(part).start: part for part in parts}

        def loss_of(student_logits: Tensor, span: slice) -> Tensor:
            part = units_of[span.start]
            teacher_logits = inputs.teacher_at(teacher.rows[teacher.span(part)]).to(dtype)
            log_q = _log_mean((teacher_logits / temperature).log_softmax(-1), teacher.lengths[part])
            mean = _log_arithmetic_mean if self.arithmetic_student else _log_mean
            log_p = mean((student_logits / temperature).log_softmax(-1), student.lengths[part])
            return compare(log_p, log_q, part).sum()

        spans = [student.span(part) for part in parts]
        total = chunked_sum(inputs.student_logits, student.rows, loss_of, width=inputs.student_size, parts=spans)
        return reduced("kd", total * temperature**2, len(units), normalizer)


@dataclass(frozen=True, slots=True)
class _Positions:
    """All rows of the chunks on one side, one chunk after another."""

    rows: Tensor
    """int64 [R]"""
    lengths: Tensor
    """int64 [U]: rows of each chunk, 1 or more."""
    offsets: list[int]
    """[U + 1]: where chunks begin in `rows`; on the host, since they cut it."""

    @staticmethod
    def of(first_rows: Tensor, lengths: Tensor) -> _Positions:
        ends = lengths.cumsum(0)
        offsets = [0, *ends.tolist()]
        to_row = (first_rows - (ends - lengths)).repeat_interleave(lengths, output_size=offsets[-1])
        return _Positions(to_row + torch.arange(offsets[-1], device=lengths.device), lengths, offsets)

    def span(self, units: slice) -> slice:
        return slice(self.offsets[units.start], self.offsets[units.stop])

    def extra_cells(self, size: int) -> int:
        """fp32 numbers alive per unit, on average, before its positions are one."""
        return -(-5 * size * len(self.rows) // max(1, len(self.lengths)))


def _log_mean(log_p: Tensor, lengths: Tensor) -> Tensor:
    """Mean of each segment of rows: [R, X] → [U, X], in a fixed order."""
    return torch.segment_reduce(log_p, "mean", lengths=lengths, axis=0, unsafe=True)


def _log_arithmetic_mean(log_p: Tensor, lengths: Tensor) -> Tensor:
    """log of the mean of exp: [R, X] → [U, X]; the lowest finite number where all are −inf, which has no gradient."""
    log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min)
    peak = torch.segment_reduce(log_p.detach(), "max", lengths=lengths, axis=0, unsafe=True)
    mass = (log_p - peak.repeat_interleave(lengths, dim=0, output_size=len(log_p))).exp()
    return _log_mean(mass, lengths).log() + peak
