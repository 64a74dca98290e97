"""Divergences of a student from a teacher distribution: the formulas of methods.md §3.1.

Values and gradients are closed forms, so that s = t gives exactly zero for both and a cell that is empty on both sides
gives no NaN. The forward and reverse KL carry the term that makes them Bregman divergences (± Σ(s − t)): nothing for
distributions of equal mass, and what makes every cell of the gradient vanish on its own at s = t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.errors import ConfigError
from nemo_opd.kernels.forms import FORWARD_KL, JSD, MIXED, REVERSE_KL, TVD, Measure
from nemo_opd.logits.saved import scaled
from nemo_opd.logits.term import Onto, UnitRows
from nemo_opd.losses.fused import fused
from nemo_opd.losses.softmax import softmax


@dataclass(frozen=True, slots=True)
class Divergence:
    """Kind and parameters of a divergence. Raises ConfigError for an unknown kind or a weight outside [0, 1]."""

    kind: str = "forward_kl"
    """A key of DIVERGENCES."""
    beta: float = 0.5
    """jsd: weight of the teacher in the mixture; 0 is forward KL and 1 is reverse KL."""
    mixed_weight: float = 0.5
    """mixed: the share of forward KL."""

    def __post_init__(self) -> None:
        if self.kind not in DIVERGENCES:
            known = ", ".join(DIVERGENCES)
            raise ConfigError(f"divergence={self.kind!r}: there is no such divergence; choose from {known}")
        for key, value in (("beta", self.beta), ("mixed_weight", self.mixed_weight)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{key}={value}: it is a share; give a number from 0 to 1")

    @property
    def forward_share(self) -> float | None:
        """Share of forward KL, the rest being reverse KL; None where it is neither."""
        if self.kind == "jsd":
            return 1 - self.beta if self.beta in (0, 1) else None
        return {"forward_kl": 1.0, "reverse_kl": 0.0, "mixed": self.mixed_weight}.get(self.kind)

    @property
    def is_finite_without_teacher(self) -> bool:
        """Whether a cell adds a finite number if the teacher gives it nothing and the student something."""
        return self.forward_share in (None, 1)

    @property
    def excess_weight(self) -> float:
        """Factor of s − t in each cell, in addition to the formulas of methods.md §3.1."""
        return 0.0 if self.forward_share is None else 2 * self.forward_share - 1

    @property
    def form(self) -> DivergenceForm:
        """The formula: at the ends of their range jsd and mixed are one KL, as 0 times the other could be NaN."""
        share, at_end = self.forward_share, {0.0: "reverse_kl", 1.0: "forward_kl"}
        return DIVERGENCES[self.kind if share is None else at_end.get(share, self.kind)]

    @property
    def measure(self) -> Measure | None:
        """The same for kernels; None where they do not know it."""
        return None if self.form.measure is None else self.form.measure(self)

    def __call__(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        """Compare log-probabilities [..., X] and [..., X] of teacher and student → [...], in nats (methods.md §3.1).

        Computed in fp32 (fp64 for fp64 input). The teacher is a constant. A cell that is −inf on both sides counts
        nothing.
        """
        return _Divergence.apply(*_in_one_dtype(log_t, log_s), self)

    def of_logits(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Compare the softmax of logits/τ [..., X] and [..., X]: faster, with a gradient for the logits."""
        return _DivergenceOfLogits.apply(*_in_one_dtype(teacher, student), self)


class _Divergence(torch.autograd.Function):
    """Saves the gradient with respect to log_s, formed in forward, and nothing else."""

    @staticmethod
    def forward(ctx: Any, log_t: Tensor, log_s: Tensor, of: Divergence) -> Tensor:
        value, gradient = _compare(log_t, log_s, of)
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return None, scaled(gradient, grad_output.unsqueeze(-1)), None


class _DivergenceOfLogits(_Divergence):
    """The same with respect to the student's logits: g − s · Σg, for g with respect to log s."""

    @staticmethod
    def forward(ctx: Any, teacher: Tensor, student: Tensor, of: Divergence) -> Tensor:
        value, gradient = compare_with_gradient(teacher, student, of)
        ctx.save_for_backward(gradient)
        return value


@fused
def _compare(log_t: Tensor, log_s: Tensor, of: Divergence) -> tuple[Tensor, Tensor]:
    """Return the value [...], and its gradient with respect to log_s [..., X]."""
    return of.form.formula(of, Cells(log_t.exp(), log_s.exp(), log_t - log_s))


@fused
def compare_with_gradient(teacher: Tensor, student: Tensor, of: Divergence) -> tuple[Tensor, Tensor]:
    """Compare the softmax of logits/τ: return the value [...], and its gradient for the student's logits [..., X]."""
    comparison = compare_logits(*_in_one_dtype(teacher, student), of)
    return comparison.value, comparison.gradient


@dataclass(frozen=True, slots=True)
class _Compared:
    """Comparison of logits/τ, closed in form."""

    value: Tensor
    """[...]"""
    gradient: Tensor
    """[..., X]: with respect to the student's logits."""
    s: Tensor
    """[..., X]: the student's probabilities."""
    log_sum: Tensor
    """float64 [..., 1]: log Σ exp of the student's logits."""


def compare_logits(teacher: Tensor, student: Tensor, of: Divergence) -> _Compared:
    """Compare the softmax of logits/τ [..., X] and [..., X], in one dtype."""
    t, log_sum_t = softmax.function(teacher)
    s, log_sum_s = softmax.function(student)
    # Rounded after the two are taken from each other, or its error would be that of every cell.
    shift = (log_sum_t - log_sum_s).to(student.dtype)
    value, gradient = of.form.formula(of, Cells(t, s, (teacher - student).sub_(shift)))
    if of.forward_share != 1:  # There g is s − t, of sum 0.
        gradient.addcmul_(s, gradient.sum(-1, keepdim=True), value=-1)
    return _Compared(value, gradient, s, log_sum_s)


@fused
def add_comparison(student: UnitRows, teacher: UnitRows, of: Divergence, onto: Onto) -> Tensor:
    """Compare the softmax of logits/τ [u, X] of either side → [u], and add its gradient, in one go."""
    comparison = compare_logits(*_in_one_dtype(teacher.taken(), student.taken()), of)
    onto.add(comparison.gradient)
    return comparison.value


def _in_one_dtype(teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(student.dtype, torch.float32)
    return teacher.detach().to(dtype), student.to(dtype)


@dataclass(frozen=True, slots=True)
class Cells:
    """Probabilities t of the teacher and s of the student, and log(t / s), [..., X] each.

    A formula may write over `t` and `log_ratio`, and not over `s`: few and reused tensors are most of the speed.
    """

    t: Tensor
    s: Tensor
    log_ratio: Tensor
    """log t − log s; NaN where both are empty."""


def _forward_kl(of: Divergence, cells: Cells) -> tuple[Tensor, Tensor]:
    forward = _times(cells.log_ratio, cells.t)
    excess = _excess(cells)
    return forward.add_(excess).sum(-1), excess


def _reverse_kl(of: Divergence, cells: Cells) -> tuple[Tensor, Tensor]:
    reverse = _times(cells.log_ratio, cells.s).neg_()
    return cells.t.sub_(cells.s).add_(reverse).sum(-1), reverse


def _mixed(of: Divergence, cells: Cells) -> tuple[Tensor, Tensor]:
    weight = of.mixed_weight
    forward = _times(cells.log_ratio.clone(), cells.t)
    reverse = _times(cells.log_ratio, cells.s).neg_()
    excess = _excess(cells)
    value = forward.mul_(weight).add_(reverse, alpha=1 - weight).add_(excess, alpha=2 * weight - 1).sum(-1)
    return value, reverse.mul_(1 - weight).add_(excess, alpha=weight)


def _jsd(of: Divergence, cells: Cells) -> tuple[Tensor, Tensor]:
    """Compute jsd: log m is formed from the larger side and expm1, so that m = t = s holds exactly where t = s."""
    log_ratio = cells.log_ratio.nan_to_num_()  # Finite, since it is multiplied by 0 where it is not.
    # As tensors: of two Python numbers torch.where makes fp32, also among fp64 cells.
    of_student, of_teacher = cells.t.new_full((), 1 - of.beta), cells.t.new_full((), of.beta)
    weight_of_smaller = torch.where(log_ratio >= 0, of_student, of_teacher)
    log_mixture_over_larger = log_ratio.abs().neg_().expm1_().mul_(weight_of_smaller).log1p_()
    student = log_ratio.neg().clamp_(max=0).sub_(log_mixture_over_larger).mul_(cells.s).mul_(1 - of.beta)
    teacher = log_ratio.clamp_(max=0).sub_(log_mixture_over_larger).mul_(cells.t).mul_(of.beta)
    return teacher.add_(student).sum(-1), student


def _tvd(of: Divergence, cells: Cells) -> tuple[Tensor, Tensor]:
    excess = _excess(cells)
    return excess.abs().sum(-1).div_(2), excess.sign_().mul_(cells.s).div_(2)


def _excess(cells: Cells) -> Tensor:
    """Compute s − t, in place of t."""
    return torch.sub(cells.s, cells.t, out=cells.t)


def _times(log_ratio: Tensor, weight: Tensor) -> Tensor:
    """Compute weight · log_ratio, in place of log_ratio, with 0 for 0 · ±inf."""
    return log_ratio.mul_(weight).nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


@dataclass(frozen=True, slots=True)
class DivergenceForm:
    """Formulas of a divergence."""

    formula: Callable[[Divergence, Cells], tuple[Tensor, Tensor]]
    """Value [...], and gradient with respect to log s cell by cell [..., X], which is 0 in a cell where s = t."""
    measure: Callable[[Divergence], Measure] | None = None
    """The same for kernels; None: PyTorch computes it on GPUs as well."""


DIVERGENCES = {
    "forward_kl": DivergenceForm(_forward_kl, lambda of: Measure(FORWARD_KL)),
    "reverse_kl": DivergenceForm(_reverse_kl, lambda of: Measure(REVERSE_KL)),
    "jsd": DivergenceForm(_jsd, lambda of: Measure(JSD, of.beta)),
    "mixed": DivergenceForm(_mixed, lambda of: Measure(MIXED, of.mixed_weight)),
    "tvd": DivergenceForm(_tvd, lambda of: Measure(TVD)),
}
"""Divergences by the setting `divergence`. A new one is its formula, its name in config/loss.py, and a line here."""
