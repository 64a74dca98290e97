"""Losses over large rows without keeping them: the gradient is formed inside forward (METHODS §8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.losses.blocks import Block, blocks
from nemo_opd.losses.logit_rows import LogitRows, TrainableRows
from nemo_opd.losses.saved import scaled
from nemo_opd.losses.term import Term


@dataclass(frozen=True, slots=True)
class ChunkedSum:
    """Sums of losses of units."""

    total: Tensor
    """Scalar with a gradient: Σ coefficient · term."""
    of_terms: Tensor
    """[terms, 2], without a gradient: with the weights of units, and without."""


def chunked_sum(source: TrainableRows, terms: Sequence[Term], coefficients: Sequence[float]) -> ChunkedSum:
    """Σ coefficient · term over one or more terms, with a gradient for the leaves of `source` only (METHODS §8).

    Rows that several terms need are made once, and their gradients with respect to the rows are added before they are
    led on: from hidden states, the products with the head are formed once for all terms. All that is saved for backward
    are the gradients, of the type and shape of the leaves; backward scales them where they are, and copies them only if
    the graph is retained. Without a gradient to form (validation) not even they are made. No units give a zero that is
    still connected to the leaves.
    """
    if torch.is_grad_enabled() and source.needs_gradient:
        return ChunkedSum(*_ChunkedSum.apply(source, terms, coefficients, *source.leaves))
    with torch.no_grad():
        sums = _zeros(source, terms)
        for block in blocks(source, terms):
            logits = _read(source, terms, block)
            for i, (term, (part, index)) in enumerate(zip(terms, block.parts, strict=True)):
                sums[i] += term.sums(_own(logits, term, index), part)
        return ChunkedSum(*_totals(source, sums, coefficients))


def compute_dtype(source: LogitRows) -> torch.dtype:
    """fp32, or fp64 for fp64 logits."""
    return torch.promote_types(source.dtype, torch.float32)


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: TrainableRows, terms: Sequence[Term], coefficients: Sequence[float], *leaves: Tensor
    ) -> tuple[Tensor, Tensor]:
        sums, gradients = _zeros(source, terms), source.gradients()
        for block in blocks(source, terms):
            logits = _read(source, terms, block)
            gradient = None
            for i, (term, (part, index)) in enumerate(zip(terms, block.parts, strict=True)):
                found, of_term = term.sums_and_gradient(_own(logits, term, index), part, coefficients[i])
                sums[i] += found
                gradient = _added(gradient, of_term, index, logits)
            assert gradient is not None
            gradients.add(block.rows, gradients.pull_back(logits, gradient), onto=block.overlaps)
        saved = gradients.sums()
        ctx.has_gradient = [gradient is not None for gradient in saved]
        ctx.save_for_backward(*(gradient for gradient in saved if gradient is not None))
        total, of_terms = _totals(source, sums, coefficients)
        ctx.mark_non_differentiable(of_terms)
        return total, of_terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        gradients = (scaled(next(saved), grad_output) if has else None for has in ctx.has_gradient)
        return None, None, None, *gradients


def _zeros(source: LogitRows, terms: Sequence[Term]) -> Tensor:
    return torch.zeros(len(terms), 2, dtype=compute_dtype(source), device=source.device)


def _read(source: LogitRows, terms: Sequence[Term], block: Block) -> Tensor:
    return source.read(block.rows, max(term.width for term in terms)).to(compute_dtype(source))


def _own(logits: Tensor, term: Term, index: Tensor | None) -> Tensor:
    """What a term reads of a block."""
    columns = logits.narrow(1, 0, term.width)
    return columns if index is None else columns.index_select(0, index)


def _added(total: Tensor | None, gradient: Tensor, index: Tensor | None, logits: Tensor) -> Tensor:
    """The gradient with respect to a block and that of what a term reads of it, together."""
    if total is None:
        if gradient.shape == logits.shape:
            return gradient.contiguous()
        total = torch.zeros_like(logits)
    columns = total.narrow(1, 0, gradient.shape[1])
    if index is None:
        columns += gradient
    else:
        columns.index_add_(0, index, gradient)
    return total


def _totals(source: LogitRows, sums: Tensor, coefficients: Sequence[float]) -> tuple[Tensor, Tensor]:
    sums = source.reduce(sums)
    total = torch.zeros((), dtype=sums.dtype, device=sums.device)
    for weighted, coefficient in zip(sums[:, 0], coefficients, strict=True):
        total = total + coefficient * weighted
    return total, sums
