"""Likelihoods of whole chunks, whatever the tokens that spell them (methods.md §5.9)."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.saved import scaled
from nemo_opd.logits.term import Term, unit_cells
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs
from nemo_opd.losses.realised_chunks import RealisedChunks
from nemo_opd.losses.support import FAINT, without

_LIVE_COPIES = 3
"""Tensors of the size of a side's positions alive at a chunk's peak."""
_TINY_LOG = -40
"""Below, log(e^x − 1), log(1 + e^x) and log(1 − e^(−e^x)) differ from their leading term by less than float64 shows."""


@Loss
def alm(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    temperature: float = 100.0,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute τ · Σ −[a log b + (1 − a) log(1 − b)] / normalizer over chunks, and `kd` in nats (methods.md §5.9).

    a = Q^{1/τ} and b = P^{1/τ}, where Q and P are the products of the probabilities, at temperature 1, that teacher and
    student give to the tokens of the chunk. The minimum, at b = a, is τ times the entropy of a coin of bias a. Raises
    ConfigError for shapes or sizes that do not fit.
    """
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=temperature, takes_truncated=True, **shared)
    return inputs.planned([likelihood_term(inputs)])


def likelihood_term(inputs: ChunkInputs) -> Term:
    """Return τ · Σ −[a log b + (1 − a) log(1 − b)] over the units."""
    units = inputs.units
    student = RealisedChunks.of(units.student_rows, units.student_lengths, inputs.student_ids)
    teacher = RealisedChunks.of(units.teacher_rows, units.teacher_lengths, inputs.teacher_ids)

    ahead = inputs.teacher_ahead(teacher.positions.rows, teacher.positions.offsets)

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        log_surprise_q = _log_surprise(teacher, ahead.of(part).to(inputs.dtype), part, inputs.temperature)
        return _binary_cross_entropy(log_surprise_q, _log_surprise(student, logits, part, inputs.temperature))

    of_student = (student.positions.offsets, _LIVE_COPIES * inputs.student_size)
    of_teacher = (teacher.positions.offsets, _LIVE_COPIES * inputs.teacher_size)
    cells = unit_cells(len(units), 1, of_student, of_teacher)
    positions = student.positions
    term = inputs.term(positions.rows, loss_of, cells, positions.offsets, ahead=ahead)
    return term.times(inputs.temperature)


def _log_surprise(chunks: RealisedChunks, logits: Tensor, part: slice, temperature: float) -> Tensor:
    """Compute log(−log P^{1/τ}) of each unit [u], from the logits [R, X] of its tokens."""
    odds_against = _log_odds_against(logits, chunks.targets[chunks.positions.span(part)].unsqueeze(1))
    return chunks.positions.log_sum_exp(log_surprise(odds_against), part).squeeze(1) - math.log(temperature)


def _log_odds_against(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute log((1 − p)/p) of the target of each row: logits [R, X] and int64 [R, 1] → [R, 1]."""
    return _LogOddsAgainst.apply(logits, targets)


class _LogOddsAgainst(torch.autograd.Function):
    """Saves p of the other columns, and Σ of it: with respect to their logits the gradient is the ratio."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        others, mass, odds_against = (_parted if logits.device.type == "cpu" else _without)(logits, targets)
        ctx.save_for_backward(others, mass, targets)
        return odds_against

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        others, mass, targets = ctx.saved_tensors
        return scaled(others, grad_output / mass).scatter_(1, targets, -grad_output), None


def _without(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return p of the other columns, their sum, and the log of the odds against the targets [R, 1]."""
    others, log_mass = without(logits, targets)
    odds_against = (log_mass - logits.gather(1, targets)).to(logits.dtype)
    return others, torch.ones_like(odds_against), odds_against


def _parted(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_without` does, up to a factor of the first two, with less traffic.

    How many rows are looked at again is in their values, for which a host would wait.
    """
    p = logits.softmax(-1)
    own, others = p.gather(1, targets), p.scatter_(1, targets, 0)
    mass = 1 - own
    # Above 1/2 the difference loses digits, and what is faint has lost them already.
    likely = (own > 0.5).squeeze(1).nonzero().squeeze(1)
    mass[likely] = others[likely].sum(1, keepdim=True)
    odds_against = mass.log() - own.log()
    faint = (torch.minimum(own, mass) < FAINT).squeeze(1).nonzero().squeeze(1)
    if len(faint):
        others[faint], mass[faint], odds_against[faint] = _without(logits[faint], targets[faint])
    return others, mass, odds_against


def _binary_cross_entropy(log_surprise_q: Tensor, log_surprise_p: Tensor) -> Tensor:
    """Compute −[a log b + (1 − a) log(1 − b)] [U] from log(−log a) and log(−log b) [U]; the first is a constant.

    Neither −log b nor 1 − b underflows in this form. The gradient is a closed form, exactly 0 at a = b.
    """
    return _BinaryCrossEntropy.apply(log_surprise_q.detach(), log_surprise_p)


class _BinaryCrossEntropy(torch.autograd.Function):
    """Closed form with x = −log b: value a x − (1 − a) log(1 − b), derivative by log x: x (a − b)/(1 − b)."""

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

    −log p itself is 0 in fp32 where p is nearer to 1 than 2^−24.
    """
    surprise = -F.logsigmoid(-odds_against)
    return torch.where(odds_against < _TINY_LOG, odds_against, surprise.clamp(min=math.exp(2 * _TINY_LOG)).log())


def log1mexp(log_x: Tensor) -> Tensor:
    """Compute log(1 − e^{−x}) from log x."""
    x = log_x.clamp(min=_TINY_LOG).exp()
    near, far = torch.log(-torch.expm1(-x)), torch.log1p(-torch.exp(-x))
    return torch.where(log_x < _TINY_LOG, log_x, torch.where(x < math.log(2), near, far))
