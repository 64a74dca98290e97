"""Losses on matched tokens of two vocabularies (methods.md §5: gold, h_kl, strict), as plain PyTorch under autograd.

Every function takes logits/τ of the chunks' first positions, [U, V] and [U, W], and returns one loss per chunk, [U].
Index tensors are made beforehand.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.projection import ProjectionMatrix

Cellwise = Callable[[Tensor, Tensor], Tensor]
"""Log-probabilities of teacher and student [..., X] → what each cell adds to the divergence, [..., X]."""


@dataclass(frozen=True)
class Pairs:
    """Matched tokens, and those of no pair."""

    student: Tensor
    """int64 [X]"""
    teacher: Tensor
    """int64 [X]"""
    student_rest: Tensor
    """int64 [V − X]"""
    teacher_rest: Tensor
    """int64 [W − X]"""

    @staticmethod
    def exact(projection: ProjectionMatrix) -> "Pairs":
        return Pairs._of(projection, {int(s): int(t) for s, t in projection.shared_pairs})

    @staticmethod
    def relaxed(projection: ProjectionMatrix) -> "Pairs":
        """Rows with one weight of 0.6 or more; of those that claim one teacher token the best, claim after claim."""
        claims: dict[int, tuple[bool, float, int]] = {}
        rows, slots = np.nonzero((projection.weights >= 0.6) & (projection.indices >= 0))
        for s, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            t = int(projection.indices[s, slot])
            claim = (bool(projection.exact[s]), float(projection.weights[s, slot]), -s)
            claims[t] = max(claims.get(t, claim), claim)
        return Pairs._of(projection, {-claim[2]: t for t, claim in claims.items()})

    @staticmethod
    def _of(projection: ProjectionMatrix, partner: dict[int, int]) -> "Pairs":
        student, teacher = np.array(sorted(partner.items())).T
        rest = [
            np.setdiff1d(np.arange(size), ids)
            for size, ids in ((projection.student_vocab_size, student), (projection.teacher_vocab_size, teacher))
        ]
        return Pairs(*(torch.from_numpy(ids.astype(np.int64)) for ids in (student, teacher, *rest)))


def gold(student: Tensor, teacher: Tensor, divergence: Cellwise, pairs: Pairs, tail_k: int = 8192) -> Tensor:
    """Pairs and one rest cell a side, plus the sorted difference of the likeliest tokens of no pair."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    rest_p, rest_q = p[:, pairs.student_rest], q[:, pairs.teacher_rest]
    cells_p = torch.cat([p[:, pairs.student], rest_p.sum(-1, keepdim=True)], -1)
    cells_q = torch.cat([q[:, pairs.teacher], rest_q.sum(-1, keepdim=True)], -1)
    if not (rest_p.shape[-1] and rest_q.shape[-1]):
        cells_p, cells_q = (cells[:, :-1] / cells[:, :-1].sum(-1, keepdim=True) for cells in (cells_p, cells_q))
    common = divergence(_log(cells_q), _log(cells_p)).sum(-1)
    tail_p, tail_q = (tail.sort(-1, descending=True).values[:, :tail_k] for tail in (rest_p, rest_q))
    return common + (_padded(tail_p, tail_q) - _padded(tail_q, tail_p)).abs().sum(-1)


def strict(student: Tensor, teacher: Tensor, divergence: Cellwise, pairs: Pairs) -> Tensor:
    """The pairs alone, renormalised."""
    log_q, log_p = teacher[:, pairs.teacher].log_softmax(-1), student[:, pairs.student].log_softmax(-1)
    return divergence(log_q, log_p).sum(-1)


def strict_top_k(student: Tensor, teacher: Tensor, divergence: Cellwise, pairs: Pairs, k: int) -> Tensor:
    """Of the pairs those k that the student finds likeliest, renormalised."""
    z_p, z_q = student[:, pairs.student], teacher[:, pairs.teacher]
    best = z_p.detach().topk(k).indices
    return divergence(z_q.gather(-1, best).log_softmax(-1), z_p.gather(-1, best).log_softmax(-1)).sum(-1)


def _log(p: Tensor) -> Tensor:
    """Empty cells would be −inf, and −inf − −inf is NaN."""
    return p.clamp(min=torch.finfo(p.dtype).tiny).log()


def _padded(tail: Tensor, other: Tensor) -> Tensor:
    return F.pad(tail, (0, max(0, other.shape[-1] - tail.shape[-1])))
