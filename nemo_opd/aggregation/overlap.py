"""Overlap of the student's likeliest tokens with a teacher's, at positions of the student's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import planned
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.overlap import plan_chunk_overlap, plan_overlap
from nemo_opd.types import SampledRows, TeacherRows, TokenRows

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_EVERY = 4
"""One token, or aligned chunk, in so many: it takes a search through both sides' logits."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlap of one teacher with the student."""

    projection: ProjectionMatrix | None
    """None where they share a tokenizer."""
    student_vocab_size: int
    teacher_vocab_size: int

    @staticmethod
    def across(projection: ProjectionMatrix | None, student_vocab_size: int, teacher_vocab_size: int) -> Overlap | None:
        """Return the overlap with a teacher of another tokenizer; None where no token is the same in both."""
        if projection is None or not len(projection.shared_pairs):
            return None
        return Overlap(projection, student_vocab_size, teacher_vocab_size)

    def plan(
        self,
        student_logits: Tensor | LogitRows,
        teacher_logits: LogitRows,
        student: TokenRows,
        teacher: TeacherRows,
        sampled: SampledRows,
    ) -> PlannedLoss:
        """Plan the metric `overlap` of the samples in these rows; student: the rows that the teacher is compared on."""
        if teacher.chunks is None:
            (mask,) = planned(_some_tokens, student.loss_mask, sampled.is_sampled)
            return plan_overlap(
                student_logits,
                teacher_logits,
                mask=mask,
                student_vocab_size=self.student_vocab_size,
                teacher_vocab_size=self.teacher_vocab_size,
            )
        assert self.projection is not None
        (chunks,) = planned(_some_chunks, teacher.chunks.student, sampled.is_sampled)
        return plan_chunk_overlap(
            student_logits,
            teacher_logits,
            projection=self.projection,
            student_ids=student.ids,
            teacher_ids=teacher.tokens.ids,
            student_chunk_id=chunks,
            teacher_chunk_id=teacher.chunks.teacher,
            student_vocab_size=self.student_vocab_size,
            teacher_vocab_size=self.teacher_vocab_size,
        )


def _some_tokens(mask: Tensor, is_sampled: Tensor) -> list[Tensor]:
    is_taken = torch.arange(mask.shape[1], device=mask.device) % _EVERY == 0
    return [mask & is_sampled.unsqueeze(1) & is_taken]


def _some_chunks(chunks: Tensor, is_sampled: Tensor) -> list[Tensor]:
    return [chunks.masked_fill(~is_sampled.unsqueeze(1) | (chunks % _EVERY != 0), -1)]
