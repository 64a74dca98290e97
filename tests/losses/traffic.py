"""Losses at the size of real models, on a pretended GPU that knows shapes only: prints what each asks for, as JSON.

uv run python -m tests.losses.traffic
uv run python -m tests.losses.traffic --by-part    # kernels and gigabytes by operation, most bytes first

A student of the shape of Llama-3.2-1B learns from heads of the shapes of Llama-3.2-3B and Qwen3-4B, in bf16, at 2,048
positions; two of three tokens of its vocabulary have a partner in the other, and every third chunk has two tokens.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_opd.distributed.transfer import together
from nemo_opd.logits.blocks import block_bytes
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.planned import PlannedLoss, compute_together
from nemo_opd.logits.saved import backward
from nemo_opd.losses import cross_entropy, gold, p_kl, same_vocab, shared_prefix, strict
from nemo_opd.projection import ProjectionMatrix
from tests.pretend_gpu import DEVICE, Work, counted

POSITIONS = 2048
STUDENT, SAME, CROSS = (2048, 128_256), (3072, 128_256), (2560, 151_936)
"""Width and vocabulary of each model."""
LONGEST_ROW = 4
MEMORY = 80 * 2**30
"""Of the device."""


def projection(size: int, others: int) -> ProjectionMatrix:
    """Two thirds of the student's tokens in pairs, the others spelled by up to `LONGEST_ROW` tokens."""
    generator = np.random.default_rng(0)
    indices = np.full((size, LONGEST_ROW), -1, np.int32)
    is_pair = generator.random(size) < 2 / 3
    partners = generator.permutation(others)[: int(is_pair.sum())]
    indices[is_pair, 0] = partners
    rest = np.flatnonzero(~is_pair)
    lengths = generator.integers(1, LONGEST_ROW + 1, len(rest))
    starts = generator.integers(0, others - LONGEST_ROW, len(rest))
    for slot in range(LONGEST_ROW):
        kept = slot < lengths
        indices[rest[kept], slot] = starts[kept] + slot
    weights = (indices >= 0) / np.maximum((indices >= 0).sum(1, keepdims=True), 1)
    first = np.full(others, -1)
    first[partners] = np.arange(len(partners))
    shared = {"student_shared_prefix": generator.integers(0, len(partners), size), "teacher_shared_prefix": first}
    return ProjectionMatrix(indices, weights.astype(np.float32), is_pair, teacher_vocab_size=others, **shared)


@dataclass(frozen=True)
class Sides:
    """What losses read of a microbatch on the device."""

    student: HeadLogits
    same: HeadLogits
    cross: HeadLogits
    ids: Tensor
    """int64 [1, S]"""
    teacher_ids: Tensor
    """int64 [1, S]: their partners in the other vocabulary."""
    mask: Tensor
    chunks: Tensor
    projection: ProjectionMatrix

    @staticmethod
    def made() -> "Sides":
        """Make them on the pretended GPU, without values."""
        sides = Sides.of(POSITIONS, partial(torch.empty, dtype=torch.bfloat16), DEVICE)
        sides.student.block_bytes = block_bytes("cuda", MEMORY)
        return sides

    @staticmethod
    def of(positions: int, draw: Callable[..., Tensor], device: torch.device) -> "Sides":
        """Make them with hidden states and heads that `draw` makes, as torch.empty does."""
        places = torch.arange(positions).unsqueeze(0)
        in_chunks = places - (places + 1) // 4
        between = projection(STUDENT[1], CROSS[1])
        pairs = torch.from_numpy(between.shared_pairs[:positions].astype(np.int64))
        own, others = (side.unsqueeze(0).contiguous() for side in pairs.unbind(1))
        ids, teacher_ids, mask, chunks = together([own, others, torch.ones_like(places), in_chunks], device)
        student, same, cross = (
            HeadLogits(draw(1, positions, width, device=device), Head(draw(vocabulary, width, device=device)))
            for width, vocabulary in (STUDENT, SAME, CROSS)
        )
        for leaf in student.leaves:
            leaf.requires_grad_()
        return Sides(student, same, cross, ids, teacher_ids, mask, chunks, between)

    @property
    def across(self) -> dict[str, Any]:
        """Arguments of a loss between two tokenizers."""
        return {
            "student_ids": self.ids,
            "teacher_ids": self.teacher_ids,
            "student_chunk_id": self.chunks,
            "teacher_chunk_id": self.chunks,
            "projection": self.projection,
        }


Plan = Callable[[Sides], PlannedLoss]
PLANS: dict[str, Plan] = {
    "cross_entropy": lambda of: cross_entropy.plan(of.student, of.ids, mask=of.mask),
    **{
        f"same_vocab, {kind}": lambda of, kind=kind: same_vocab.plan(of.student, of.same, mask=of.mask, divergence=kind)
        for kind in ("forward_kl", "reverse_kl", "mixed", "jsd", "tvd")
    },
    **{
        loss.__name__: lambda of, loss=loss: loss.plan(of.student, of.cross, **of.across)
        for loss in (p_kl, gold, strict, shared_prefix)
    },
}
TOGETHER = ("cross_entropy", "same_vocab, forward_kl", "p_kl")


def found(work: Work, sides: Sides, *names: str) -> Work:
    """Forward and backward as a worker calls them, in a second call: what is made once was made in the first."""
    for _ in range(2):
        work.clear()
        backward(compute_together([PLANS[name](sides) for name in names]).loss)
    return work


def by_part(work: Work) -> str:
    """Return a table of operations."""
    kernels, num_bytes = Counter[str](), Counter[str]()
    for kernel in work.kernels:
        kernels[kernel.name] += 1
        num_bytes[kernel.name] += kernel.num_bytes
    rows = [f"{total / 1e9:8.3f} GB {kernels[name]:4d} {name}" for name, total in num_bytes.most_common()]
    return "\n".join(row for row in rows if not row.lstrip().startswith("0.000"))


def main() -> dict[str, Any]:
    with counted(has_values=False) as work:
        sides = Sides.made()
        alone = {name: found(work, sides, name).taken() for name in PLANS}
        return alone | {"together": found(work, sides, *TOGETHER).taken()}


def print_parts() -> None:
    with counted(has_values=False) as work:
        sides = Sides.made()
        for names in (TOGETHER, *((name,) for name in PLANS)):
            print(f"{', '.join(names)}\n{by_part(found(work, sides, *names))}\n")


if __name__ == "__main__":
    if "--by-part" in sys.argv:
        print_parts()
    else:
        print(json.dumps(main()))
