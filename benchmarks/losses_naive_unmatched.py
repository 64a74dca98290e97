"""Losses that need no map between vocabularies (methods.md §5: uld, alm), as plain PyTorch under autograd."""

import torch
import torch.nn.functional as F
from torch import Tensor


def uld(student: Tensor, teacher: Tensor) -> Tensor:
    """Logits/τ of the chunks' first positions, [U, V] and [U, W] → Σ of the differences by rank, [U]."""
    p, q = (side.softmax(-1).sort(-1, descending=True).values for side in (student, teacher))
    ranks = max(p.shape[-1], q.shape[-1])
    return (F.pad(p, (0, ranks - p.shape[-1])) - F.pad(q, (0, ranks - q.shape[-1]))).abs().sum(-1)


def log_likelihood(logits: Tensor, targets: Tensor, unit: Tensor, num_units: int) -> Tensor:
    """Logits [R, X] that predict the tokens of chunks, their ids [R] and chunks [R] → log P of each chunk, [U]."""
    log_p = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return log_p.new_zeros(num_units).index_add(0, unit, log_p)


def alm(log_p: Tensor, log_q: Tensor, temperature: float) -> Tensor:
    """Log-likelihoods of the chunks [U] → [U], τ² left to the caller as in the other losses."""
    log_b, a = log_p / temperature, (log_q / temperature).exp()
    not_b = -torch.expm1(log_b.clamp(max=-1e-6))
    return -(a * log_b + (1 - a) * not_b.log()) / temperature
