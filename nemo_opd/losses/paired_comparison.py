"""Divergence on token pairs, optionally with a rest cell, with a closed-form gradient (methods.md §3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_opd.logits.term import GradientSink, UnitRows
from nemo_opd.losses.divergence import Divergence, compare_logits
from nemo_opd.losses.fused import fused
from nemo_opd.losses.pairs import TokenPairs
from nemo_opd.losses.softmax import softmax


@fused
def add_comparison_of_pairs(
    student: UnitRows,
    teacher: UnitRows,
    pairs: TokenPairs,
    divergence: Divergence,
    has_rest: bool,
    onto: GradientSink,
    weight: float = 1.0,
    slopes: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Compare logits/τ of units, [u, V] and [u, W], on X pairs → [u], and add weight · gradient to `onto`.

    has_rest: add one cell for each side's unpaired tokens; otherwise both sides are renormalised on the pairs. slopes,
    only with a rest cell: derivatives [u, V] of another loss with respect to the probabilities of unpaired tokens, 0
    for paired ones, and a factor of them; the gradient of that loss is added too.
    """
    student_logits = student.gather()
    teacher_logits = teacher.gather().to(student_logits.dtype)
    student_cells = student_logits.index_select(1, pairs.student)
    teacher_cells = teacher_logits.index_select(1, pairs.teacher)
    if not has_rest:
        comparison = compare_logits(teacher_cells, student_cells, divergence)
        onto.add(_token_gradient(comparison.gradient, torch.zeros_like(student_logits), pairs).mul_(weight))
        return comparison.value
    p_in_rest, log_rest = softmax.function(_masked(student_logits, pairs.place < 0))
    student_cells = _with_rest(student_cells, log_rest, student_logits.amax(-1, keepdim=True))
    teacher_unpaired = teacher_logits.index_select(1, pairs.teacher_rest)
    log_rest = softmax.function(teacher_unpaired.clamp(min=torch.finfo(teacher_logits.dtype).min))[1]
    teacher_cells = _with_rest(teacher_cells, log_rest, teacher_logits.amax(-1, keepdim=True))
    comparison = compare_logits(teacher_cells, student_cells, divergence)
    cell_gradient, rest_gradient = comparison.gradient.mul_(weight), comparison.gradient[:, -1:]
    if slopes is not None:
        p_slopes, factor = slopes
        scaled_rest = factor * comparison.s[:, -1:]
        mean_slope = scaled_rest * (p_in_rest * p_slopes).sum(-1, keepdim=True)
        cell_gradient = cell_gradient - mean_slope * comparison.s
        rest_gradient = cell_gradient[:, -1:] + scaled_rest * p_slopes
    onto.add(_token_gradient(cell_gradient[:, :-1], rest_gradient * p_in_rest, pairs))
    return comparison.value


def _masked(logits: Tensor, mask: Tensor) -> Tensor:
    """Set logits [u, V] outside a mask, and −inf, to the lowest finite number."""
    lowest = torch.finfo(logits.dtype).min
    return torch.where(mask, logits.clamp(min=lowest), lowest)


def _with_rest(cells: Tensor, log_rest: Tensor, peak: Tensor) -> Tensor:
    """Append a rest cell, float64 [u, 1], to cells [u, X], all minus a peak: fp32 keeps more digits near 0."""
    return torch.cat([cells - peak, (log_rest - peak).to(cells.dtype)], -1)


def _token_gradient(pair_gradient: Tensor, unpaired_gradient: Tensor, pairs: TokenPairs) -> Tensor:
    """Combine gradients of pairs [u, X] and of unpaired student tokens, in their columns of [u, V], into [u, V]."""
    is_paired = pairs.place >= 0
    return torch.where(is_paired, pair_gradient.index_select(1, pairs.place.clamp(min=0)), unpaired_gradient)
