"""Inputs of losses in the sizes of real models.

A student with the shape of Llama-3.2-1B learns from heads with the shapes of Llama-3.2-3B and Qwen3-4B. Two of three
tokens have a partner in the other vocabulary, and every third chunk has two tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_opd.distributed.transfer import to_device_batched
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.losses import (
    alm,
    byte_prefix,
    cross_entropy,
    gold,
    h_kl,
    p_kl,
    same_vocab,
    sampled_chunk_kl,
    sampled_kl,
    shared_prefix,
    strict,
    tcad,
    uld,
)
from nemo_opd.projection import ProjectionMatrix
from tests.losses.cases import bytes_of

STUDENT, SAME, CROSS = (2048, 128_256), (3072, 128_256), (2560, 151_936)
"""Width and vocabulary of each model."""
LONG = (2560, 262_144)
"""A teacher with longer tokens than the student, in the shape of Gemma-3-4B."""
BEGINNINGS = 16_384
"""Student tokens that begin the teacher's two-piece tokens: eight tokens each."""
LONGEST_ROW = 4


def projection(size: int, teacher_size: int) -> ProjectionMatrix:
    """Pair two thirds of the student's tokens; up to `LONGEST_ROW` teacher tokens stand for each remaining one."""
    generator = np.random.default_rng(0)
    indices = np.full((size, LONGEST_ROW), -1, np.int32)
    is_pair = generator.random(size) < 2 / 3
    partners = generator.permutation(teacher_size)[: int(is_pair.sum())]
    indices[is_pair, 0] = partners
    unpaired = np.flatnonzero(~is_pair)
    lengths = generator.integers(1, LONGEST_ROW + 1, len(unpaired))
    starts = generator.integers(0, teacher_size - LONGEST_ROW, len(unpaired))
    for slot in range(LONGEST_ROW):
        has_slot = slot < lengths
        indices[unpaired[has_slot], slot] = starts[has_slot] + slot
    weights = (indices >= 0) / np.maximum((indices >= 0).sum(1, keepdims=True), 1)
    first = np.full(teacher_size, -1)
    first[partners] = np.arange(len(partners))
    shared = {"student_shared_prefix": generator.integers(0, len(partners), size), "teacher_shared_prefix": first}
    # Each teacher token begins with one student token, and no other token begins with it.
    teacher_ids = np.arange(teacher_size)
    first_pieces = generator.integers(0, size, teacher_size)
    prefixes = {
        "byte_prefix": first_pieces,
        "teacher_spellings": first_pieces,
        "teacher_spelling_ends": teacher_ids + 1,
        "teacher_byte_order": np.stack([teacher_ids, teacher_ids, teacher_ids + 1], 1),
    }
    return ProjectionMatrix(
        indices, weights.astype(np.float32), is_pair, teacher_vocab_size=teacher_size, **shared, **prefixes
    )


@dataclass(frozen=True)
class Sides:
    """Inputs of losses for a microbatch on the device."""

    student: HeadLogits
    same: HeadLogits
    cross: HeadLogits
    ids: Tensor
    """int64 [1, S]"""
    teacher_ids: Tensor
    """int64 [1, S]: the partners of `ids` in the other vocabulary."""
    mask: Tensor
    chunks: Tensor
    projection: ProjectionMatrix

    @staticmethod
    def of(
        positions: int,
        draw: Callable[..., Tensor],
        device: torch.device,
        divisor: int = 1,
        between: ProjectionMatrix | None = None,
    ) -> "Sides":
        """Make hidden states and heads with `draw`, which has the signature of torch.empty.

        divisor: divides widths and vocabularies. between: a projection, which also sets the heads' vocabularies, or
        None for a made-up one.
        """
        sizes = [(width // divisor, vocabulary // divisor) for width, vocabulary in (STUDENT, SAME, CROSS)]
        if between is None:
            between = projection(sizes[0][1], sizes[2][1])
        student_size, teacher_size = between.student_vocab_size, between.teacher_vocab_size
        sizes = [
            (width, size) for (width, _), size in zip(sizes, (student_size, student_size, teacher_size), strict=True)
        ]
        places = torch.arange(positions).unsqueeze(0)
        in_chunks = places - (places + 1) // 4
        pairs = torch.from_numpy(between.shared_pairs[:positions].astype(np.int64))
        student_ids, partner_ids = (side.unsqueeze(0).contiguous() for side in pairs.unbind(1))
        ids, teacher_ids, mask, chunks = to_device_batched(
            [student_ids, partner_ids, torch.ones_like(places), in_chunks], device
        )
        student, same, cross = (
            HeadLogits(draw(1, positions, width, device=device), Head(draw(vocabulary, width, device=device)))
            for width, vocabulary in sizes
        )
        for leaf in student.leaves:
            leaf.requires_grad_()
        return Sides(student, same, cross, ids, teacher_ids, mask, chunks, between)

    @property
    def chunk_arguments(self) -> dict[str, Any]:
        """Arguments of a loss between two tokenizers."""
        return {
            "student_ids": self.ids,
            "teacher_ids": self.teacher_ids,
            "student_chunk_id": self.chunks,
            "teacher_chunk_id": self.chunks,
        }

    @property
    def across(self) -> dict[str, Any]:
        """Arguments of a loss that compares tokens of two vocabularies."""
        return {**self.chunk_arguments, "projection": self.projection}


@dataclass(frozen=True)
class LongerTokens:
    """Inputs of `byte_prefix` for a text with a teacher of longer tokens."""

    student: HeadLogits
    teacher: HeadLogits
    student_ids: Tensor
    teacher_ids: Tensor
    student_chunk_id: Tensor
    teacher_chunk_id: Tensor
    projection: ProjectionMatrix

    def plan(self, **settings: Any) -> PlannedLoss:
        names = ("student_ids", "teacher_ids", "student_chunk_id", "teacher_chunk_id", "projection")
        arguments = {name: getattr(self, name) for name in names}
        return byte_prefix.plan(self.student, self.teacher, **arguments, **settings)

    @property
    def product(self) -> int:
        """Floating-point operations of the product with the teacher's head."""
        return 2 * (self.teacher_ids.numel() - 1) * LONG[0] * LONG[1]


def longer_tokens(positions: int, draw: Callable[..., Tensor], device: torch.device) -> LongerTokens:
    """Make two chunks for every three student tokens; every second chunk is a teacher token with two pieces."""
    (width, size), (teacher_width, teacher_size) = STUDENT, LONG
    tokens_of_teacher = np.arange(teacher_size)
    is_long = tokens_of_teacher >= size
    first = np.where(is_long, tokens_of_teacher % BEGINNINGS, tokens_of_teacher)
    pieces = np.stack([first, np.where(is_long, tokens_of_teacher // BEGINNINGS, -1)], 1)
    texts = [token.to_bytes(3) for token in range(size)]
    between = ProjectionMatrix(
        np.full((size, 1), -1),
        np.zeros((size, 1)),
        teacher_vocab_size=teacher_size,
        teacher_spellings=pieces[pieces >= 0],
        teacher_spelling_ends=np.cumsum((pieces >= 0).sum(1)),
        teacher_byte_order=np.stack([tokens_of_teacher, tokens_of_teacher, tokens_of_teacher + 1], 1),
        **bytes_of(texts, [b"".join(texts[piece] for piece in row if piece >= 0) for row in pieces.tolist()]),
    )
    num_chunks = positions * 2 // 3
    tokens = np.where(np.arange(num_chunks) % 2, size, 1) + np.arange(num_chunks)
    spelled = pieces[tokens]
    places = torch.arange(num_chunks)
    chunks = torch.from_numpy(np.repeat(np.arange(num_chunks), (spelled >= 0).sum(1)))
    ids = torch.from_numpy(spelled[spelled >= 0])
    on_host = (ids, torch.from_numpy(tokens), chunks, places)
    sent = to_device_batched([side.unsqueeze(0) for side in on_host], device)
    student = HeadLogits(draw(1, len(ids), width, device=device), Head(draw(size, width, device=device)))
    for leaf in student.leaves:
        leaf.requires_grad_()
    teacher = draw(1, num_chunks, teacher_width, device=device), Head(draw(teacher_size, teacher_width, device=device))
    return LongerTokens(student, HeadLogits(*teacher), *sent, between)


Plan = Callable[[Sides], PlannedLoss]
PLANS: dict[str, Plan] = {
    "cross_entropy": lambda sides: cross_entropy.plan(sides.student, sides.ids, mask=sides.mask),
    **{
        f"same_vocab, {kind}": lambda sides, kind=kind: same_vocab.plan(
            sides.student, sides.same, mask=sides.mask, divergence=kind
        )
        for kind in ("forward_kl", "reverse_kl", "mixed", "jsd", "tvd")
    },
    **{
        loss.__name__: lambda sides, loss=loss: loss.plan(sides.student, sides.cross, **sides.across)
        for loss in (p_kl, gold, h_kl, strict, byte_prefix, shared_prefix)
    },
    **{
        loss.__name__: lambda sides, loss=loss: loss.plan(sides.student, sides.cross, **sides.chunk_arguments)
        for loss in (alm, uld, sampled_chunk_kl)
    },
    "tcad": lambda sides: tcad.plan(sides.student, sides.same, mask=sides.mask, normalizer=1),
    "sampled_kl": lambda sides: sampled_kl.plan(sides.student, sides.same, ids=sides.ids, mask=sides.mask),
}
TOGETHER = ("cross_entropy", "same_vocab, forward_kl", "p_kl")
