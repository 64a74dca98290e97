"""Logits that a head makes from hidden states (METHODS §8, §9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.losses.logit_rows import Gradients, TrainableRows, new_leaf, put_rows


@dataclass(frozen=True, eq=False, slots=True)
class Head:
    """From hidden states to logits: soft_cap · tanh(scale · (W h + bias) / soft_cap)."""

    weight: Tensor
    """[X, D]"""
    bias: Tensor | None = None
    """[X]"""
    scale: float = 1.0
    soft_cap: float | None = None
    """None: none."""

    def __post_init__(self) -> None:
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ConfigError(
                f"a head with weight {list(self.weight.shape)} has a bias {list(self.bias.shape)}; "
                f"give {list(self.weight.shape[:1])}"
            )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ConfigError(f"soft_cap={self.soft_cap}: logits are divided by it; give a number above 0, or none")

    def after_linear(self, linear: Tensor) -> Tensor:
        """What becomes of W h + bias [..., X]; in fp32 at least, where there is something to be done."""
        if self.scale == 1 and self.soft_cap is None:
            return linear
        logits = linear.to(torch.promote_types(linear.dtype, torch.float32)) * self.scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


class HeadLogits(TrainableRows):
    """Logits that a head makes from hidden states [B, S, D], a chunk at a time, so that they are never all there.

    Hidden states, weight and bias each get a gradient where they take one; the weight's is summed over chunks in fp32.
    """

    def __init__(self, hidden: Tensor, head: Head) -> None:
        """Raises ConfigError where width or dtype of hidden states and head differ."""
        if hidden.shape[-1] != head.weight.shape[1] or hidden.dtype != head.weight.dtype:
            raise ConfigError(
                f"hidden states are {list(hidden.shape)} {hidden.dtype}, the head's weight {list(head.weight.shape)} "
                f"{head.weight.dtype}; width and dtype must be equal"
            )
        self.hidden, self.head = hidden, head
        self.leaves = (hidden, head.weight) if head.bias is None else (hidden, head.weight, head.bias)
        self.shape = (hidden.shape[0], hidden.shape[1], len(head.weight))
        self.device, self.dtype, self.is_product = hidden.device, hidden.dtype, True

    @torch.no_grad()
    def read(self, rows: Tensor, width: int) -> Tensor:
        head = self.head
        bias = None if head.bias is None else head.bias[:width]
        hidden = self.hidden.flatten(0, 1).index_select(0, rows)
        return head.after_linear(F.linear(hidden, head.weight[:width], bias))

    def gradients(self) -> Gradients:
        return _HeadGradients(self.hidden, self.head)

    def cut_off(self) -> HeadLogits:
        """The same of hidden states as a new leaf, on which gradients gather before they go back through a model."""
        return HeadLogits(new_leaf(self.hidden), self.head)


class _HeadGradients(Gradients):
    def __init__(self, hidden: Tensor, head: Head) -> None:
        self._head, self._hidden = head, hidden.detach().flatten(0, 1)
        self._shape = hidden.shape
        self._of_hidden = torch.zeros_like(self._hidden) if hidden.requires_grad else None
        self._of_weight = _fp32_zeros(head.weight)
        self._of_bias = None if head.bias is None else _fp32_zeros(head.bias)

    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        width = gradient.shape[1]
        weight = self._head.weight.detach()[:width]
        if self._of_bias is not None:
            self._of_bias[:width] += gradient.sum(0)
        gradient = gradient.to(weight.dtype)
        if self._of_hidden is not None:
            put_rows(self._of_hidden, rows, gradient @ weight, onto)
        if self._of_weight is not None:
            _add_product(self._of_weight[:width], gradient.t(), self._hidden.index_select(0, rows))

    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        if self._head.soft_cap is not None:
            gradient = gradient * (1 - (logits / self._head.soft_cap).square())
        return gradient if self._head.scale == 1 else gradient * self._head.scale

    def sums(self) -> tuple[Tensor | None, ...]:
        hidden = None if self._of_hidden is None else self._of_hidden.view(self._shape)
        weight = None if self._of_weight is None else self._of_weight.to(self._head.weight.dtype)
        if self._head.bias is None:
            return hidden, weight
        return hidden, weight, None if self._of_bias is None else self._of_bias.to(self._head.bias.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Where the types agree, without a matrix for the product."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _fp32_zeros(leaf: Tensor) -> Tensor | None:
    if not leaf.requires_grad:
        return None
    return torch.zeros(leaf.shape, dtype=torch.promote_types(leaf.dtype, torch.float32), device=leaf.device)
