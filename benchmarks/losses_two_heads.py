"""Losses from hidden states: two heads, the student's trained, and no logits handed over (methods.md §8.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from losses_naive_divergences import full, jsd
from torch import Tensor

from nemo_opd import losses
from nemo_opd.logits.blocks import block_bytes
from nemo_opd.logits.head import Head, HeadLogits

HeadsLoss = Callable[["Heads"], Tensor]
"""The mean JSD (β = ½) over all positions but the last, which predicts nothing."""


@dataclass(frozen=True)
class Heads:
    """Final hidden states and heads of one vocabulary; the student's are leaves."""

    student_hidden: Tensor
    """[1, S, D]"""
    student_weight: Tensor
    """[V, D]"""
    teacher_hidden: Tensor
    """[1, S, E]"""
    teacher_weight: Tensor
    """[V, E]"""

    @staticmethod
    def random(positions: int, vocab: int, widths: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Heads:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, scale: float) -> Tensor:
            return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

        own, theirs = widths
        heads = Heads(
            draw(1, positions, own, scale=1.0),
            draw(vocab, own, scale=3 * own**-0.5),
            draw(1, positions, theirs, scale=1.0),
            draw(vocab, theirs, scale=3 * theirs**-0.5),
        )
        for leaf in heads.leaves:
            leaf.requires_grad_()
        return heads

    @property
    def leaves(self) -> list[Tensor]:
        return [self.student_hidden, self.student_weight]

    @property
    def inputs(self) -> list[Tensor]:
        return [*self.leaves, self.teacher_hidden, self.teacher_weight]

    @property
    def student_rows(self) -> Tensor:
        """[S − 1, D]"""
        return self.student_hidden[0, :-1]

    @property
    def teacher_rows(self) -> Tensor:
        """[S − 1, E]"""
        return self.teacher_hidden[0, :-1]

    @property
    def gemm_flops(self) -> int:
        """6N·D·V + 2N·E·W: three products of the student's head, one of the teacher's."""
        (vocab, own), theirs = self.student_weight.shape, self.teacher_weight.shape[1]
        return len(self.student_rows) * vocab * (6 * own + 2 * theirs)


def ours(heads: Heads) -> Tensor:
    mask = torch.ones(heads.student_hidden.shape[:2], dtype=torch.bool, device=heads.student_hidden.device)
    student = HeadLogits(heads.student_hidden, Head(heads.student_weight))
    if student.device.type == "cuda":  # the budget that a run gives its student
        student.block_bytes = block_bytes("cuda", torch.cuda.get_device_properties(student.device).total_memory)
    teacher = HeadLogits(heads.teacher_hidden, Head(heads.teacher_weight))
    return losses.same_vocab(student, teacher, mask=mask, divergence="jsd").loss


def naive(heads: Heads) -> Tensor:
    """All logits at once."""
    student = (heads.student_rows @ heads.student_weight.t()).float()
    with torch.no_grad():
        teacher = (heads.teacher_rows @ heads.teacher_weight.t()).float()
    return full(student, teacher, jsd).mean()


def gemm_floor(heads: Heads) -> Tensor:
    """The four matrix products alone, on what stands in for the gradient of the logits; its backward does nothing."""
    with torch.no_grad():
        logits = heads.student_rows @ heads.student_weight.t()
        teacher = heads.teacher_rows @ heads.teacher_weight.t()
        del teacher
        hidden_gradient, weight_gradient = logits @ heads.student_weight, logits.t() @ heads.student_rows
    return (hidden_gradient[0, 0] + weight_gradient[0, 0]).requires_grad_()
