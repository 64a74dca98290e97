"""Surprise of tokens: −log p."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.logits.saved import scaled
from nemo_opd.logits.term import Onto
from nemo_opd.losses.fused import fused
from nemo_opd.losses.softmax import softmax

LIVE_COPIES = 4
"""Tensors of the size of the logits alive at its peak, they themselves included."""


def surprise(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute −log p of a token in each row, in nats: logits [R, X] and int64 [R] → [R]."""
    return _Surprise.apply(logits, targets.unsqueeze(1))


def add_surprise(logits: Tensor, targets: Tensor, onto: Onto) -> Tensor:
    """Compute the same, and add its gradient."""
    log_sum = _add_softmax(logits, onto.total, onto.factors, onto.is_first)
    targets = targets.unsqueeze(1)
    onto.total.scatter_add_(1, targets, -onto.factors)
    return (log_sum - logits.gather(1, targets)).squeeze(1).to(logits.dtype)


@fused
def _add_softmax(logits: Tensor, total: Tensor, factors: Tensor, is_first: bool) -> Tensor:
    p, log_sum = softmax.function(logits)
    Onto(total, factors, is_first).add(p)
    return log_sum


class _Surprise(torch.autograd.Function):
    """−log p [R] of targets [R, 1] by logits [R, X]. Saves its gradient, formed in forward: p, less 1 at the target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        p, log_sum = softmax(logits)
        surprise = log_sum - logits.gather(-1, targets)
        ctx.save_for_backward(p.scatter_add_(-1, targets, p.new_full((), -1.0).expand_as(targets)))
        return surprise.squeeze(-1).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return scaled(gradient, grad_output.unsqueeze(-1)), None
