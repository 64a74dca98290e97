"""Negative log-probability of tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.logits.saved import scaled
from nemo_opd.logits.term import GradientSink, UnitRows
from nemo_opd.losses.fused import fused
from nemo_opd.losses.softmax import softmax

LIVE_COPIES = 4
"""Tensors of the size of the logits, themselves included, that are alive at the memory peak."""


def surprise(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute −log p of each row's target token, in nats: logits [R, X] and int64 [R] → [R]."""
    return _Surprise.apply(logits, targets.unsqueeze(1))


@fused
def add_surprise(rows: UnitRows, targets: Tensor, onto: GradientSink) -> Tensor:
    """Compute −log p from logits/τ of units and targets, int64 [u] → [u], and add the gradient to `onto`."""
    logits, targets = rows.gather(), targets.unsqueeze(1)
    p, log_sum = softmax.function(logits)
    onto.add(_subtract_one_at(p, targets))
    return (log_sum - logits.gather(1, targets)).squeeze(1).to(logits.dtype)


def _subtract_one_at(p: Tensor, targets: Tensor) -> Tensor:
    """Subtract 1 from p [..., X] at targets, int64 [..., 1]; in place unless compiled."""
    if torch.compiler.is_compiling():  # Fuses into the pass that computes p; a scatter would be another pass.
        return p - (torch.arange(p.shape[-1], device=p.device) == targets).to(p.dtype)
    return p.scatter_add_(-1, targets, p.new_full((), -1.0).expand_as(targets))


class _Surprise(torch.autograd.Function):
    """−log p [R] of targets [R, 1] from logits [R, X]. Saves its gradient: p, minus 1 at the target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        p, log_sum = softmax(logits)
        surprise = log_sum - logits.gather(-1, targets)
        ctx.save_for_backward(_subtract_one_at(p, targets))
        return surprise.squeeze(-1).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return scaled(gradient, grad_output.unsqueeze(-1)), None
