"""Softmax with its denominator, for one exponential a cell."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.logits.saved import scaled
from nemo_opd.losses.fused import fused


@fused
def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities p of logits [..., X], and log Σ exp [..., 1] in fp64: log p = logits − log Σ exp.

    The second is read off the largest p, and holds for each p to its own rounding, whatever that of the sum.
    """
    p = logits.softmax(-1)
    return p, logits.amax(-1, keepdim=True).double() - p.amax(-1, keepdim=True).double().log()


def log_sum_exp(logits: Tensor) -> Tensor:
    """Compute log Σ exp over cells of which one at least is finite: [..., X] → [...].

    Unlike torch.logsumexp it is as fast as a softmax, also where most cells underflow.
    """
    return _LogSumExp.apply(logits)


class _LogSumExp(torch.autograd.Function):
    """Saves the softmax, which is the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        p, log_sum = softmax(logits)
        ctx.save_for_backward(p)
        return log_sum.to(logits.dtype).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return scaled(p, grad_output.unsqueeze(-1))
