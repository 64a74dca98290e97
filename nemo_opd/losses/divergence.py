"""Divergences of a student from a teacher distribution: the one home of METHODS §3.

Values and gradients are closed forms, so that s = t gives exactly zero for both and a cell that is empty on both sides
gives no NaN. The forward and reverse KL carry the term that makes them Bregman divergences (± Σ(s − t)): nothing for
distributions of equal mass, and what makes every cell of the gradient vanish on its own at s = t.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.errors import ConfigError

KINDS = ("forward_kl", "reverse_kl", "jsd", "mixed", "tvd")


@dataclass(frozen=True, slots=True)
class Divergence:
    """Which divergence, with its parameters."""

    kind: str = "forward_kl"
    """One of KINDS."""
    beta: float = 0.5
    """jsd: weight of the teacher in the mixture; 0 is forward KL and 1 is reverse KL."""
    mixed_weight: float = 0.5
    """mixed: the share of forward KL."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"divergence={self.kind!r}: there is no such divergence; choose from {', '.join(KINDS)}")
        for key, value in (("beta", self.beta), ("mixed_weight", self.mixed_weight)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{key}={value}: it is a share; give a number from 0 to 1")

    @property
    def forward_share(self) -> float | None:
        """How much of it is forward KL and, as the rest, reverse KL; None where it is neither."""
        if self.kind == "jsd":
            return 1 - self.beta if self.beta in (0, 1) else None
        return {"forward_kl": 1.0, "reverse_kl": 0.0, "mixed": self.mixed_weight}.get(self.kind)

    @property
    def excess_weight(self) -> float:
        """How often s − t is added to each cell, over what METHODS §3 sums."""
        return 0.0 if self.forward_share is None else 2 * self.forward_share - 1

    def __call__(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        """[..., X] and [..., X] → [...]; see `divergence`."""
        dtype = torch.promote_types(log_s.dtype, torch.float32)
        return _Divergence.apply(log_t.detach().to(dtype), log_s.to(dtype), self)


def divergence(
    log_t: Tensor, log_s: Tensor, kind: str = "forward_kl", *, beta: float = 0.5, mixed_weight: float = 0.5
) -> Tensor:
    """Divergence of each unit, in nats: log-probabilities [U, X] of teacher and student → [U] (METHODS §3).

    Computed in fp32 (fp64 for fp64 input). The teacher is a constant. A cell that is −inf on both sides counts nothing.
    Raises ConfigError for an unknown kind or a weight outside [0, 1].
    """
    return Divergence(kind, beta, mixed_weight)(log_t, log_s)


class _Divergence(torch.autograd.Function):
    """Saves the gradient with respect to log_s, formed in forward, and nothing else."""

    @staticmethod
    def forward(ctx: Any, log_t: Tensor, log_s: Tensor, of: Divergence) -> Tensor:
        cells = _Cells.of(log_t, log_s)
        value, gradient = _formula(of)(cells)
        ctx.save_for_backward(gradient)
        return value.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return None, gradient * grad_output.unsqueeze(-1), None


@dataclass(frozen=True, slots=True)
class _Cells:
    t: Tensor
    s: Tensor
    log_ratio: Tensor
    """log t − log s; 0 where both are empty."""

    @staticmethod
    def of(log_t: Tensor, log_s: Tensor) -> "_Cells":
        log_ratio = (log_t - log_s).masked_fill(log_t == log_s, 0)
        return _Cells(log_t.exp(), log_s.exp(), log_ratio)


_Formula = Callable[[_Cells], tuple[Tensor, Tensor]]
"""Value and gradient with respect to log s, cell by cell."""


def _formula(of: Divergence) -> _Formula:
    """At the ends of their range jsd and mixed are one of the KLs; the other, times 0, could be infinite."""
    share = of.forward_share
    if share is None:
        return _tvd if of.kind == "tvd" else lambda cells: _jsd(cells, of.beta)
    if share in (0, 1):
        return _forward_kl if share == 1 else _reverse_kl
    return lambda cells: _mixed(cells, share)


def _forward_kl(cells: _Cells) -> tuple[Tensor, Tensor]:
    excess = cells.s - cells.t
    return _times(cells.t, cells.log_ratio) + excess, excess


def _reverse_kl(cells: _Cells) -> tuple[Tensor, Tensor]:
    gradient = -_times(cells.s, cells.log_ratio)
    return gradient + cells.t - cells.s, gradient


def _mixed(cells: _Cells, weight: float) -> tuple[Tensor, Tensor]:
    forward, forward_gradient = _forward_kl(cells)
    reverse, reverse_gradient = _reverse_kl(cells)
    value = weight * forward + (1 - weight) * reverse
    return value, weight * forward_gradient + (1 - weight) * reverse_gradient


def _jsd(cells: _Cells, beta: float) -> tuple[Tensor, Tensor]:
    """log m is formed from the larger side and expm1, so that m = t = s holds exactly where t = s."""
    # As tensors: of two Python numbers torch.where makes fp32, also among fp64 cells.
    weights = cells.t.new_tensor([beta, 1 - beta])
    weight_of_smaller = torch.where(cells.log_ratio >= 0, weights[1], weights[0])
    log_mixture_over_larger = torch.log1p(weight_of_smaller * torch.expm1(-cells.log_ratio.abs()))
    teacher = _times(cells.t, cells.log_ratio.clamp(max=0) - log_mixture_over_larger)
    student = _times(cells.s, (-cells.log_ratio).clamp(max=0) - log_mixture_over_larger)
    return beta * teacher + (1 - beta) * student, (1 - beta) * student


def _tvd(cells: _Cells) -> tuple[Tensor, Tensor]:
    excess = cells.s - cells.t
    return excess.abs() / 2, excess.sign() * cells.s / 2


def _times(weight: Tensor, log_ratio: Tensor) -> Tensor:
    """weight · log_ratio, with 0 · ±inf = 0."""
    return (weight * log_ratio).masked_fill(weight == 0, 0)
