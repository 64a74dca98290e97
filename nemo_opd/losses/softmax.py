"""Softmax with its denominator, for one exponential a cell."""

from torch import Tensor


def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [..., X] → probabilities p [..., X], and log Σ exp [..., 1] in fp64: log p = logits − log Σ exp.

    The second is read off the largest p, and holds for each p to its own rounding, whatever that of the sum.
    """
    p = logits.softmax(-1)
    return p, logits.amax(-1, keepdim=True).double() - p.amax(-1, keepdim=True).double().log()
