"""Overlap of the student's and a teacher's likeliest tokens, in the student's samples or in validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.overlap import plan_chunk_overlap, plan_overlap
from nemo_opd.losses.teacher_images import teacher_images
from nemo_opd.types import SampledRows, TeacherRows, TokenRows

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_STRIDE = 16
"""Only tokens, or aligned chunks, 1, 17, 33, … are compared: each teacher row costs a product with the head."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """The `overlap` metric of one teacher and the student."""

    projection: ProjectionMatrix | None
    """None if they share a tokenizer."""
    student_vocab_size: int
    teacher_vocab_size: int
    images: NDArray[np.bool_] | None = None
    """[W]: teacher tokens that the loss has an image of; None if it needs none."""

    @staticmethod
    def across(
        projection: ProjectionMatrix | None, student_vocab_size: int, teacher_vocab_size: int, loss: str
    ) -> Overlap | None:
        """Return the metric for a teacher with another tokenizer, or None if the two have no token in common."""
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
        """Plan the metric `overlap`, and `kd_mass` with images, of the sampled rows, or of all if `sampled` is None.

        student: the student's tokens that this teacher is compared on.
        """
        is_sampled = () if sampled is None else (sampled.is_sampled,)
        if teacher.chunks is None:
            (mask,) = compute_on_host(_strided_mask, student.loss_mask, *is_sampled)
            return plan_overlap(
                student_logits,
                teacher_logits,
                mask=mask,
                student_vocab_size=self.student_vocab_size,
                teacher_vocab_size=self.teacher_vocab_size,
            )
        assert self.projection is not None
        (chunks,) = compute_on_host(_strided_chunks, teacher.chunks.student, *is_sampled)
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


def _strided_mask(mask: Tensor, is_sampled: Tensor | None = None) -> list[Tensor]:
    mask = mask & (torch.arange(mask.shape[1], device=mask.device) % _STRIDE == 1)
    return [mask if is_sampled is None else mask & is_sampled.unsqueeze(1)]


def _strided_chunks(chunks: Tensor, is_sampled: Tensor | None = None) -> list[Tensor]:
    chunks = chunks.masked_fill(chunks % _STRIDE != 1, -1)
    return [chunks if is_sampled is None else chunks.masked_fill(~is_sampled.unsqueeze(1), -1)]
