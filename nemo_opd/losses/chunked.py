"""Losses over large rows without keeping them: the gradient is formed inside forward (METHODS §8)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from nemo_opd.errors import ConfigError
from nemo_opd.losses.logit_rows import LogitRows, TrainableRows
from nemo_opd.losses.saved import scaled

CHUNK_BYTES = 256 * 2**20
"""Budget for the temporaries of one chunk: enough rows to fill a GPU."""
CPU_CHUNK_BYTES = 64 * 2**20
"""The same on a CPU, where a chunk should stay near its cache."""

ChunkLoss = Callable[[Tensor, slice], Tensor]
"""(logits [R, X] in the compute dtype, which units they are of) → the loss of each unit, [u].

A unit may have several rows. There may be no unit at all.
"""


@dataclass(frozen=True, slots=True)
class Term:
    """A sum of losses over units, to be taken chunk by chunk."""

    rows_of: Callable[[slice], Tensor]
    """The rows [R] of [B·S] that the units of a part need, none of them needed twice."""
    loss_of: ChunkLoss
    """Whatever else it reads (teacher logits, targets) it closes over and slices itself; that gets no gradient."""
    parts: Sequence[slice]
    """Of the units; see `unit_parts`."""
    weights: Tensor | None = None
    """[U]; None: all 1."""
    factor: float = 1.0

    def times(self, factor: float) -> Term:
        return replace(self, factor=self.factor * factor)

    def sums(self, logits: Tensor, part: slice) -> Tensor:
        """Weighted and unweighted: [2]."""
        losses = self.loss_of(logits, part)
        unweighted = losses.sum()
        total = unweighted if self.weights is None else (losses * self.weights[part]).sum()
        return torch.stack([total, unweighted]) * self.factor

    def sums_and_gradient(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Sums [2] and the gradient of the first with respect to logits [R, X].

        A caller's saved-tensor hooks (offloading, accounting) are for what outlives forward; they do not see a chunk.
        """
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            leaf = logits.detach().requires_grad_()
            sums = self.sums(leaf, part)
            (gradient,) = torch.autograd.grad(sums[0], leaf)
        return sums.detach(), gradient


@dataclass(frozen=True, slots=True)
class UnitSum:
    """Losses of units, summed up."""

    total: Tensor
    """Scalar with a gradient: each unit times its weight."""
    unweighted: Tensor
    """Scalar without one."""


def chunked_sum(source: TrainableRows, terms: Sequence[Term], *, width: int) -> UnitSum:
    """Σ of the terms over the leading `width` columns, with a gradient for the leaves of `source` only (METHODS §8).

    All that is saved for backward are the gradients, of the type and shape of the leaves; backward scales them where
    they are, and copies them only if the graph is retained. Without a gradient to form (validation) not even they are
    made. No units give a zero that is still connected to the leaves.
    """
    if torch.is_grad_enabled() and source.needs_gradient:
        return UnitSum(*_ChunkedSum.apply(source, terms, width, *source.leaves))
    totals = torch.zeros(2, dtype=compute_dtype(source), device=source.device)
    with torch.no_grad():
        for term in terms:
            for part in own_parts(source, term.parts):
                totals += term.sums(_read(source, term, part, width), part)
    return UnitSum(*source.reduce(totals).unbind())


def compute_dtype(source: LogitRows) -> torch.dtype:
    """fp32, or fp64 for fp64 logits."""
    return torch.promote_types(source.dtype, torch.float32)


def unit_parts(source: LogitRows, cells: Sequence[int], chunk_size: int | None = None) -> list[slice]:
    """Consecutive slices of the units: of `chunk_size` units, by default of as many as fit a byte budget.

    cells [U + 1]: fp32 numbers that the units before each take at the peak of a chunk; see `unit_cells`. A part has one
    unit at least, and by default no more than leave a part for each process of a share. Raises ConfigError for a
    chunk_size below 1.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(
            f"chunk_size={chunk_size}: a chunk has at least 1 row; give a larger number, or none for the default"
        )
    num_units, budget = len(cells) - 1, (CPU_CHUNK_BYTES if source.device.type == "cpu" else CHUNK_BYTES) // 4
    most = max(1, -(-num_units // source.share[1])) if chunk_size is None else chunk_size
    parts, start = [], 0
    while start < num_units:
        fitting = num_units if chunk_size is not None else bisect_right(cells, cells[start] + budget) - 1
        stop = min(max(fitting, start + 1), start + most, num_units)
        parts.append(slice(start, stop))
        start = stop
    return parts


def unit_cells(num_units: int, cells_per_unit: int, *positions: tuple[Sequence[int], int]) -> Sequence[int]:
    """`unit_parts`' cells of units that take `cells_per_unit` each and, for positions they have several of, more.

    positions: where units begin among them [U + 1], and the cells that one takes.
    """
    each = range(0, (num_units + 1) * cells_per_unit, cells_per_unit)
    if not positions:
        return each
    return [cells + sum(begin[i] * size for begin, size in positions) for i, cells in enumerate(each)]


def own_parts(source: LogitRows, parts: Sequence[slice]) -> Iterator[slice]:
    """The parts that this process of a share computes: equally many in each, with empty ones at the end."""
    index, processes = source.share
    end = parts[-1].stop if parts else 0
    for first in range(0, len(parts), processes):
        yield parts[first + index] if first + index < len(parts) else slice(end, end)


def _read(source: LogitRows, term: Term, part: slice, width: int) -> Tensor:
    return source.read(term.rows_of(part), width).to(compute_dtype(source))


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: TrainableRows, terms: Sequence[Term], width: int, *leaves: Tensor
    ) -> tuple[Tensor, Tensor]:
        totals = torch.zeros(2, dtype=compute_dtype(source), device=source.device)
        gradients = source.gradients()
        for term in terms:
            for part in own_parts(source, term.parts):
                logits = _read(source, term, part, width)
                sums, gradient = term.sums_and_gradient(logits, part)
                totals += sums
                gradients.add(term.rows_of(part), gradients.pull_back(logits, gradient), onto=term is not terms[0])
        saved = gradients.sums()
        ctx.has_gradient = [gradient is not None for gradient in saved]
        ctx.save_for_backward(*(gradient for gradient in saved if gradient is not None))
        total, unweighted = (value.clone() for value in source.reduce(totals))
        ctx.mark_non_differentiable(unweighted)
        return total, unweighted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        gradients = (scaled(next(saved), grad_output) if has else None for has in ctx.has_gradient)
        return None, None, None, *gradients


def _same(tensor: Tensor) -> Tensor:
    return tensor
