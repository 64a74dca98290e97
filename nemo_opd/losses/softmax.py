"""Softmax and log-sum-exp from one exponential per cell."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.logits.saved import scaled
from nemo_opd.losses.fused import fused


@fused
def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities p of logits [..., X], and log Σ exp [..., 1] in fp64: log p = logits − log Σ exp.

    log Σ exp is derived from the largest p, so that the identity holds up to each p's rounding, not the sum's.
    """
    p = logits.softmax(-1)
    return p, logits.amax(-1, keepdim=True).double() - p.amax(-1, keepdim=True).double().log()


def log_sum_exp(logits: Tensor) -> Tensor:
    """Compute log Σ exp over cells, at least one of them finite: [..., X] → [...].

    Unlike torch.logsumexp it is as fast as a softmax, even if most cells underflow.
    """
    return _LogSumExp.apply(logits)


class _LogSumExp(torch.autograd.Function):
    """Log-sum-exp that saves the softmax, its gradient."""

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
