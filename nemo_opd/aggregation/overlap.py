"""Overlap of the student's likeliest tokens with a teacher's, in the student's samples or in validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.distributed.transfer import planned
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.overlap import plan_chunk_overlap, plan_overlap
from nemo_opd.losses.teacher_images import teacher_images
from nemo_opd.types import SampledRows, TeacherRows, TokenRows

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_EVERY = 16
"""Period of the tokens, or aligned chunks, that are compared, from the second on: each row of a teacher costs a
product.
"""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlap of one teacher with the student."""

    projection: ProjectionMatrix | None
    """None where they share a tokenizer."""
    student_vocab_size: int
    teacher_vocab_size: int
    images: NDArray[np.bool_] | None = None
    """[W]: teacher tokens that the loss has an image of; None if it needs none."""

    @staticmethod
    def across(
        projection: ProjectionMatrix | None, student_vocab_size: int, teacher_vocab_size: int, loss: str
    ) -> Overlap | None:
        """Return the overlap with a teacher of another tokenizer; None where no token is the same in both."""
        if projection is None or not len(projection.shared_pairs):
            return None
        images = teacher_images(loss, projection)
        return Overlap(projection, student_vocab_size, teacher_vocab_size, images)

    def plan(
        self,
        student_logits: Tensor | LogitRows,
        teacher_logits: LogitRows,
        student: TokenRows,
        teacher: TeacherRows,
        sampled: SampledRows | None,
    ) -> PlannedLoss:
        """Plan the metric `overlap`, and `kd_mass` with images, of these rows' samples or, without any, all texts.

        student: the rows that the teacher is compared on.
        """
        of_samples = () if sampled is None else (sampled.is_sampled,)
        if teacher.chunks is None:
            (mask,) = planned(_some_tokens, student.loss_mask, *of_samples)
            return plan_overlap(
                student_logits,
                teacher_logits,
                mask=mask,
                student_vocab_size=self.student_vocab_size,
                teacher_vocab_size=self.teacher_vocab_size,
            )
        assert self.projection is not None
        (chunks,) = planned(_some_chunks, teacher.chunks.student, *of_samples)
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
            images=self.images,
        )


def _some_tokens(mask: Tensor, is_sampled: Tensor | None = None) -> list[Tensor]:
    is_taken = torch.arange(mask.shape[1], device=mask.device) % _EVERY == 1
    return [mask & is_taken if is_sampled is None else mask & is_sampled.unsqueeze(1) & is_taken]


def _some_chunks(chunks: Tensor, is_sampled: Tensor | None = None) -> list[Tensor]:
    some = chunks.masked_fill(chunks % _EVERY != 1, -1)
    return [some if is_sampled is None else some.masked_fill(~is_sampled.unsqueeze(1), -1)]
