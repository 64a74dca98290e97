"""A comparison on pairs of tokens, and maybe a rest cell, with its gradient in closed form (methods.md §3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_opd.logits.term import Onto, UnitRows
from nemo_opd.losses.divergence import Divergence, compare_logits
from nemo_opd.losses.fused import fused
from nemo_opd.losses.pairs import TokenPairs
from nemo_opd.losses.softmax import softmax


@fused
def add_comparison_of_pairs(
    student: UnitRows,
    teacher: UnitRows,
    pairs: TokenPairs,
    of: Divergence,
    has_rest: bool,
    onto: Onto,
    weight: float = 1.0,
    slopes: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Compare logits/τ of units, [u, V] and [u, W], on X pairs → [u], and add weight · its gradient.

    has_rest: there is one more cell, for the other tokens of either side; without it both are renormalised on the
    pairs. slopes: derivatives [u, V], times a factor, of a further loss with respect to the probabilities of the other
    tokens, 0 for those of pairs; its gradient is added as well. Only with a rest cell.
    """
    own = student.taken()
    others = teacher.taken().to(own.dtype)
    of_student, of_teacher = own.index_select(1, pairs.student), others.index_select(1, pairs.teacher)
    if not has_rest:
        found = compare_logits(of_teacher, of_student, of)
        onto.add(_of_tokens(found.gradient, torch.zeros_like(own), pairs).mul_(weight))
        return found.value
    in_rest, rest = softmax.function(_only(own, pairs.place < 0))
    of_student = _with_rest(of_student, rest, own.amax(-1, keepdim=True))
    rest = softmax.function(others.index_select(1, pairs.teacher_rest).clamp(min=torch.finfo(others.dtype).min))[1]
    of_teacher = _with_rest(of_teacher, rest, others.amax(-1, keepdim=True))
    found = compare_logits(of_teacher, of_student, of)
    of_cells, of_others = found.gradient.mul_(weight), found.gradient[:, -1:]
    if slopes is not None:
        of_p, factor = slopes
        p_of_rest = factor * found.s[:, -1:]
        lean = p_of_rest * (in_rest * of_p).sum(-1, keepdim=True)
        of_cells = of_cells - lean * found.s
        of_others = of_cells[:, -1:] + p_of_rest * of_p
    onto.add(_of_tokens(of_cells[:, :-1], of_others * in_rest, pairs))
    return found.value


def _only(logits: Tensor, is_kept: Tensor) -> Tensor:
    """Give other cells of [u, V], and those of −inf, the lowest finite number."""
    lowest = torch.finfo(logits.dtype).min
    return torch.where(is_kept, logits.clamp(min=lowest), lowest)


def _with_rest(cells: Tensor, rest: Tensor, peak: Tensor) -> Tensor:
    """Append the rest, float64 [u, 1], to cells [u, X], both less a peak: near 0 it keeps its digits in fp32."""
    return torch.cat([cells - peak, (rest - peak).to(cells.dtype)], -1)


def _of_tokens(of_pairs: Tensor, of_others: Tensor, pairs: TokenPairs) -> Tensor:
    """Put gradients of pairs [u, X] in the places of their student tokens, among those of all [u, V]."""
    is_paired = pairs.place >= 0
    return torch.where(is_paired, of_pairs.index_select(1, pairs.place.clamp(min=0)), of_others)
