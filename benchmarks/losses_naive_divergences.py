"""Divergences, losses of a shared vocabulary and cross entropy (methods.md §3, §4), as plain PyTorch under autograd.

Every function takes logits/τ of the compared positions, [U, V] of either side, and returns one loss per position, [U].
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Cellwise = Callable[[Tensor, Tensor], Tensor]
"""Log-probabilities of teacher and student [..., X] → what each cell adds to the divergence, [..., X]."""


def forward_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    return F.kl_div(log_p, log_q, reduction="none", log_target=True)


def reverse_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    return F.kl_div(log_q, log_p, reduction="none", log_target=True)


def jsd(log_q: Tensor, log_p: Tensor, beta: float = 0.5) -> Tensor:
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    return beta * forward_kl(log_q, log_m) + (1 - beta) * forward_kl(log_p, log_m)


def mixed(log_q: Tensor, log_p: Tensor, weight: float = 0.5) -> Tensor:
    return weight * forward_kl(log_q, log_p) + (1 - weight) * reverse_kl(log_q, log_p)


def tvd(log_q: Tensor, log_p: Tensor) -> Tensor:
    return (log_q.exp() - log_p.exp()).abs() / 2


DIVERGENCES: dict[str, Cellwise] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "mixed": mixed,
    "tvd": tvd,
}


def full(student: Tensor, teacher: Tensor, divergence: Cellwise) -> Tensor:
    """Every column."""
    return divergence(teacher.log_softmax(-1), student.log_softmax(-1)).sum(-1)


def top_k(student: Tensor, teacher: Tensor, divergence: Cellwise, *, chosen_by: Tensor, k: int, rest: bool) -> Tensor:
    """The k columns largest in `chosen_by`: with one cell for the mass elsewhere, or renormalised."""
    index = chosen_by.detach().topk(k).indices
    if not rest:
        log_q, log_p = (side.gather(-1, index).log_softmax(-1) for side in (teacher, student))
        return divergence(log_q, log_p).sum(-1)
    log_q, log_p = (side.log_softmax(-1).gather(-1, index) for side in (teacher, student))
    return divergence(_with_rest(log_q), _with_rest(log_p)).sum(-1)


def union(student: Tensor, teacher: Tensor, divergence: Cellwise, *, k: int) -> Tensor:
    """The k largest columns of either side, as a dense mask, and one cell for the mass elsewhere."""
    chosen = torch.zeros_like(teacher, dtype=torch.bool)
    for side in (teacher, student):
        chosen.scatter_(-1, side.detach().topk(k).indices, True)
    log_q, log_p = teacher.log_softmax(-1), student.log_softmax(-1)
    cells = divergence(log_q, log_p).masked_fill(~chosen, 0).sum(-1)
    rest_q, rest_p = (log.masked_fill(chosen, -math.inf).logsumexp(-1) for log in (log_q, log_p))
    return cells + divergence(rest_q, rest_p)


def cross_entropy(student: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(student, targets, reduction="none")


def _with_rest(log_cells: Tensor) -> Tensor:
    """[U, X] → [U, X + 1]"""
    rest = torch.log1p(-log_cells.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-7))
    return torch.cat([log_cells, rest], -1)
