"""Comparison of whole-chunk likelihoods, independent of the tokens that spell a chunk (methods.md §5.9)."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.logits.blockwise import scaled
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import Term, unit_cells
from nemo_opd.losses.arguments import check_temperature
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs, RealisedChunks
from nemo_opd.losses.support import FAINT, without

_LIVE_COPIES = 3
"""Tensors of the size of a side's positions that are alive at a block's memory peak."""
_TINY_LOG = -40
"""Below it, log(e^x − 1), log(1 + e^x) and log(1 − e^(−e^x)) equal their leading term to float64 precision."""


@Loss
def alm(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    temperature: float = 100.0,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute τ · Σ −[a log b + (1 − a) log(1 − b)] / normalizer over chunks, and `kd` in nats (methods.md §5.9).

    a = Q^{1/τ} and b = P^{1/τ}; Q and P are the products of the probabilities, at temperature 1, of the chunk's tokens
    under teacher and student. The minimum, at b = a, is τ times the entropy of a coin of bias a. Raises ConfigError for
    shapes or sizes that do not fit.
    """
    check_temperature(temperature)
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=1.0, **shared)
    return inputs.planned([likelihood_term(inputs, temperature)])


def likelihood_term(inputs: ChunkInputs, temperature: float) -> Term:
    """Build the term τ · Σ −[a log b + (1 − a) log(1 − b)] over the units, whose logits are not divided by τ."""
    units = inputs.units
    student = RealisedChunks.of(units.student_rows, units.student_lengths, inputs.student_ids)
    teacher = RealisedChunks.of(units.teacher_rows, units.teacher_lengths, inputs.teacher_ids)
    ahead = inputs.teacher_ahead(teacher.positions.rows, teacher.positions.offsets)

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        log_surprise_q = _log_surprise(teacher, ahead.of(part).to(inputs.dtype), part, temperature)
        return _BinaryCrossEntropy.apply(log_surprise_q.detach(), _log_surprise(student, logits, part, temperature))

    student_cells = (student.positions.offsets, _LIVE_COPIES * inputs.student_size)
    teacher_cells = (teacher.positions.offsets, _LIVE_COPIES * inputs.teacher_size)
    cells = unit_cells(len(units), 1, student_cells, teacher_cells)
    positions = student.positions
    term = inputs.term(positions.rows, loss_of, cells, positions.offsets, ahead=ahead)
    return term.times(temperature)


def _log_surprise(chunks: RealisedChunks, logits: Tensor, part: slice, temperature: float) -> Tensor:
    """Compute each unit's log(−log P^{1/τ}), [u], from the logits of its tokens, [R, X]."""
    odds_against = _LogOddsAgainst.apply(logits, chunks.targets[chunks.positions.span(part)].unsqueeze(1))
    return chunks.positions.log_sum_exp(log_surprise(odds_against), part).squeeze(1) - math.log(temperature)


class _LogOddsAgainst(torch.autograd.Function):
    """log((1 − p)/p) [R, 1] of targets, int64 [R, 1], from logits [R, X].

    Saves the other columns' p and Σ p; the gradient for their logits is the ratio.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        other_p, mass, odds_against = (_split_odds if logits.device.type == "cpu" else _masked_odds)(logits, targets)
        ctx.save_for_backward(other_p, mass, targets)
        return odds_against

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        other_p, mass, targets = ctx.saved_tensors
        return scaled(other_p, grad_output / mass).scatter_(1, targets, -grad_output), None


def _masked_odds(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return p of the other columns, their sum, and the log-odds against the targets [R, 1]."""
    other_p, log_mass = without(logits, targets)
    odds_against = (log_mass - logits.gather(1, targets)).to(logits.dtype)
    return other_p, torch.ones_like(odds_against), odds_against


def _split_odds(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_masked_odds` with less memory traffic; the first two results have another common factor.

    Only for CPUs: the number of rows that are recomputed depends on values, so a host would wait for a GPU.
    """
    p = logits.softmax(-1)
    target_p, other_p = p.gather(1, targets), p.scatter_(1, targets, 0)
    mass = 1 - target_p
    # For p > 1/2 the difference loses digits; p or a mass below FAINT has lost them already.
    likely = (target_p > 0.5).squeeze(1).nonzero().squeeze(1)
    mass[likely] = other_p[likely].sum(1, keepdim=True)
    odds_against = mass.log() - target_p.log()
    faint = (torch.minimum(target_p, mass) < FAINT).squeeze(1).nonzero().squeeze(1)
    if len(faint):
        other_p[faint], mass[faint], odds_against[faint] = _masked_odds(logits[faint], targets[faint])
    return other_p, mass, odds_against


class _BinaryCrossEntropy(torch.autograd.Function):
    """−[a log b + (1 − a) log(1 − b)] [U] from log(−log a) and log(−log b) [U]; no gradient for a.

    In this form −log b and 1 − b do not underflow. With x = −log b the derivative by log x is x (a − b)/(1 − b), which
    is exactly 0 at a = b.
    """

    @staticmethod
    def forward(ctx: Any, log_surprise_q: Tensor, log_surprise_p: Tensor) -> Tensor:
        surprise = log_surprise_p.exp()
        surprise_q = log_surprise_q.exp()
        not_a, not_b = -torch.expm1(-surprise_q), -torch.expm1(-surprise)
        log_not_b = log1mexp(log_surprise_p)
        ctx.save_for_backward((not_b - not_a) * (log_surprise_p - log_not_b).exp())
        return torch.exp(-surprise_q) * surprise - not_a * log_not_b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, Tensor]:
        (gradient,) = ctx.saved_tensors
        return None, gradient * grad_output


def log_surprise(odds_against: Tensor) -> Tensor:
    """Compute log(−log p) from the log-odds log((1 − p)/p).

    −log p itself would be 0 in fp32 for p within 2^−24 of 1.
    """
    surprise = -F.logsigmoid(-odds_against)
    return torch.where(odds_against < _TINY_LOG, odds_against, surprise.clamp(min=math.exp(2 * _TINY_LOG)).log())


def log1mexp(log_x: Tensor) -> Tensor:
    """Compute log(1 − e^{−x}) from log x."""
    x = log_x.clamp(min=_TINY_LOG).exp()
    near, far = torch.log(-torch.expm1(-x)), torch.log1p(-torch.exp(-x))
    return torch.where(log_x < _TINY_LOG, log_x, torch.where(x < math.log(2), near, far))
