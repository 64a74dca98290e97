"""Divergences between a teacher and a student distribution: the formulas of methods.md §3.1.

Values and gradients are closed forms: both are exactly zero at s = t, and a cell that is empty on both sides gives no
NaN. Forward and reverse KL include the term that makes them Bregman divergences, ± Σ(s − t). It is zero for
distributions of equal mass and makes each cell of the gradient vanish by itself at s = t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.errors import ConfigError, check_choice
from nemo_opd.kernels.forms import FORWARD_KL, JSD, MIXED, REVERSE_KL, TVD, Measure
from nemo_opd.logits.blockwise import scaled
from nemo_opd.logits.term import GradientSink, UnitRows
from nemo_opd.losses.fused import fused, softmax


@dataclass(frozen=True, slots=True)
class Divergence:
    """A divergence with its parameters. Raises ConfigError for an unknown kind or a weight outside [0, 1]."""

    kind: str = "forward_kl"
    """A key of DIVERGENCES."""
    beta: float = 0.5
    """jsd: weight of the teacher in the mixture; 0 is forward KL and 1 is reverse KL."""
    mixed_weight: float = 0.5
    """mixed: weight of forward KL."""

    def __post_init__(self) -> None:
        check_choice("divergence", self.kind, DIVERGENCES)
        for key, value in (("beta", self.beta), ("mixed_weight", self.mixed_weight)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{key}={value} is not a weight; give a number from 0 to 1")

    @property
    def forward_share(self) -> float | None:
        """Weight of forward KL in a mixture with reverse KL, or None for other divergences."""
        if self.kind == "jsd":
            return 1 - self.beta if self.beta in (0, 1) else None
        return {"forward_kl": 1.0, "reverse_kl": 0.0, "mixed": self.mixed_weight}.get(self.kind)

    @property
    def is_finite_without_teacher(self) -> bool:
        """Whether a cell with student mass but no teacher mass adds a finite number."""
        return self.forward_share in (None, 1)

    @property
    def excess_weight(self) -> float:
        """Factor of the s − t that is added to the formulas of methods.md §3.1 in each cell."""
        return 0.0 if self.forward_share is None else 2 * self.forward_share - 1

    @property
    def form(self) -> DivergenceForm:
        """The formula. At the ends of their range jsd and mixed are one KL, since 0 times the other could be NaN."""
        share, at_end = self.forward_share, {0.0: "reverse_kl", 1.0: "forward_kl"}
        return DIVERGENCES[self.kind if share is None else at_end.get(share, self.kind)]

    @property
    def measure(self) -> Measure | None:
        """The divergence for kernels, or None if they do not support it."""
        return None if self.form.measure is None else self.form.measure(self)

    def __call__(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        """Compare log-probabilities [..., X] and [..., X] of teacher and student → [...], in nats (methods.md §3.1).

        Computed in fp32 (fp64 for fp64 input). The teacher gets no gradient. A cell that is −inf on both sides adds 0.
        """
        return _Divergence.apply(*_in_one_dtype(log_t, log_s), self)

    def of_logits(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Compare the softmax of logits/τ [..., X] and [..., X]: faster, and the gradient is for the logits."""
        return _DivergenceOfLogits.apply(*_in_one_dtype(teacher, student), self)


class _Divergence(torch.autograd.Function):
    """Divergence of log-probabilities; saves only the gradient with respect to log_s, computed in forward."""

    @staticmethod
    def forward(ctx: Any, log_t: Tensor, log_s: Tensor, divergence: Divergence) -> Tensor:
        value, gradient = _compare(log_t, log_s, divergence)
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return None, scaled(gradient, grad_output.unsqueeze(-1)), None


class _DivergenceOfLogits(_Divergence):
    """Divergence of logits; the gradient is g − s · Σg, with g the gradient with respect to log s."""

    @staticmethod
    def forward(ctx: Any, teacher: Tensor, student: Tensor, divergence: Divergence) -> Tensor:
        value, gradient = compare_with_gradient(teacher, student, divergence)
        ctx.save_for_backward(gradient)
        return value


@fused
def _compare(log_t: Tensor, log_s: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Return the value [...] and its gradient with respect to log_s [..., X]."""
    return divergence.form.formula(divergence, Cells(log_t.exp(), log_s.exp(), log_t - log_s))


@fused
def compare_with_gradient(teacher: Tensor, student: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Compare the softmax of logits/τ: return the value [...] and its gradient for the student's logits [..., X]."""
    comparison = compare_logits(*_in_one_dtype(teacher, student), divergence)
    return comparison.value, comparison.gradient


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Result of comparing logits/τ."""

    value: Tensor
    """[...]"""
    gradient: Tensor
    """[..., X]: with respect to the student's logits."""
    s: Tensor
    """[..., X]: the student's probabilities."""
    log_sum: Tensor
    """float64 [..., 1]: log Σ exp of the student's logits."""


def compare_logits(teacher: Tensor, student: Tensor, divergence: Divergence) -> _Comparison:
    """Compare the softmax of logits/τ [..., X] and [..., X], in one dtype."""
    t, log_sum_t = softmax.function(teacher)
    s, log_sum_s = softmax.function(student)
    # Subtract in fp64 and round once: a rounding error here would shift every cell.
    shift = (log_sum_t - log_sum_s).to(student.dtype)
    value, gradient = divergence.form.formula(divergence, Cells(t, s, (teacher - student).sub_(shift)))
    if divergence.forward_share != 1:  # For forward KL g = s − t already sums to 0.
        gradient.addcmul_(s, gradient.sum(-1, keepdim=True), value=-1)
    return _Comparison(value, gradient, s, log_sum_s)


@fused
def add_comparison(student: UnitRows, teacher: UnitRows, divergence: Divergence, onto: GradientSink) -> Tensor:
    """Compare the softmax of logits/τ, [u, X] and [u, X] → [u], and add the gradient to `onto`."""
    comparison = compare_logits(*_in_one_dtype(teacher.gather(), student.gather()), divergence)
    onto.add(comparison.gradient)
    return comparison.value


def _in_one_dtype(teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(student.dtype, torch.float32)
    return teacher.detach().to(dtype), student.to(dtype)


@dataclass(frozen=True, slots=True)
class Cells:
    """Probabilities t of the teacher and s of the student, and log(t / s), each [..., X].

    A formula may overwrite `t` and `log_ratio` but not `s`: reusing tensors is most of the speed.
    """

    t: Tensor
    s: Tensor
    log_ratio: Tensor
    """log t − log s; NaN in cells that are empty on both sides."""


def _forward_kl(divergence: Divergence, cells: Cells) -> tuple[Tensor, Tensor]:
    forward = _times(cells.log_ratio, cells.t)
    excess = _excess(cells)
    return forward.add_(excess).sum(-1), excess


def _reverse_kl(divergence: Divergence, cells: Cells) -> tuple[Tensor, Tensor]:
    reverse = _times(cells.log_ratio, cells.s).neg_()
    return cells.t.sub_(cells.s).add_(reverse).sum(-1), reverse


def _mixed(divergence: Divergence, cells: Cells) -> tuple[Tensor, Tensor]:
    weight = divergence.mixed_weight
    forward = _times(cells.log_ratio.clone(), cells.t)
    reverse = _times(cells.log_ratio, cells.s).neg_()
    excess = _excess(cells)
    value = forward.mul_(weight).add_(reverse, alpha=1 - weight).add_(excess, alpha=2 * weight - 1).sum(-1)
    return value, reverse.mul_(1 - weight).add_(excess, alpha=weight)


def _jsd(divergence: Divergence, cells: Cells) -> tuple[Tensor, Tensor]:
    """Compute jsd. log m is formed from the larger side with expm1, so that m = t = s exactly if t = s."""
    log_ratio = cells.log_ratio.nan_to_num_()  # Infinite entries are multiplied by 0 below.
    # Tensors, since torch.where of two Python numbers is fp32 even among fp64 cells.
    student_weight, teacher_weight = cells.t.new_full((), 1 - divergence.beta), cells.t.new_full((), divergence.beta)
    weight_of_smaller = torch.where(log_ratio >= 0, student_weight, teacher_weight)
    log_mixture_over_larger = log_ratio.abs().neg_().expm1_().mul_(weight_of_smaller).log1p_()
    student = log_ratio.neg().clamp_(max=0).sub_(log_mixture_over_larger).mul_(cells.s).mul_(1 - divergence.beta)
    teacher = log_ratio.clamp_(max=0).sub_(log_mixture_over_larger).mul_(cells.t).mul_(divergence.beta)
    return teacher.add_(student).sum(-1), student


def _tvd(divergence: Divergence, cells: Cells) -> tuple[Tensor, Tensor]:
    excess = _excess(cells)
    return excess.abs().sum(-1).div_(2), excess.sign_().mul_(cells.s).div_(2)


def _excess(cells: Cells) -> Tensor:
    """Compute s − t in place of t."""
    return torch.sub(cells.s, cells.t, out=cells.t)


def _times(log_ratio: Tensor, weight: Tensor) -> Tensor:
    """Compute weight · log_ratio in place of log_ratio, with 0 · ±inf = 0."""
    return log_ratio.mul_(weight).nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


@dataclass(frozen=True, slots=True)
class DivergenceForm:
    """A divergence's formula for PyTorch and its measure for kernels."""

    formula: Callable[[Divergence, Cells], tuple[Tensor, Tensor]]
    """Value [...] and gradient with respect to log s of each cell [..., X], 0 in cells with s = t."""
    measure: Callable[[Divergence], Measure] | None = None
    """The divergence for kernels, or None if PyTorch computes it on GPUs too."""


DIVERGENCES = {
    "forward_kl": DivergenceForm(_forward_kl, lambda divergence: Measure(FORWARD_KL)),
    "reverse_kl": DivergenceForm(_reverse_kl, lambda divergence: Measure(REVERSE_KL)),
    "jsd": DivergenceForm(_jsd, lambda divergence: Measure(JSD, divergence.beta)),
    "mixed": DivergenceForm(_mixed, lambda divergence: Measure(MIXED, divergence.mixed_weight)),
    "tvd": DivergenceForm(_tvd, lambda divergence: Measure(TVD)),
}
"""Divergences keyed by name. A new one is its formula, its name in config/loss.py, and a line here."""
