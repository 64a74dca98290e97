"""Losses over large rows that are not kept: the gradient is computed in forward (methods.md §8.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.distributed.transfer import on_host, to_device_batched
from nemo_opd.kernels import launch
from nemo_opd.kernels.joint import Placed, add_losses
from nemo_opd.kernels.launch import KernelError, give_up
from nemo_opd.logits.blocks import Block, Step, blocks, rows_at_once
from nemo_opd.logits.rows import Gradients, LogitRows, TrainableRows, empty_rows
from nemo_opd.logits.term import Term, UnitRows, width_of


@dataclass(frozen=True, slots=True)
class BlockwiseSum:
    """Sums of losses of units."""

    total: Tensor
    """Scalar with a gradient: Σ coefficient · term."""
    of_terms: Tensor
    """[terms, 2], without a gradient: each term's sum with the weights of units, and without."""


def blockwise_sum(source: TrainableRows, terms: Sequence[Term], coefficients: Sequence[float]) -> BlockwiseSum:
    """Compute Σ coefficient · term over terms (methods.md §8.1).

    The leaves of `source` and the terms' `learned` tensors get a gradient. Rows that several terms need are computed
    once, and the terms' gradients with respect to them are added before they are propagated: with hidden states, the
    products with the head run once for all terms. Only the gradients, in the dtype and shape of the leaves, are saved
    for backward, which scales them in place and copies them only if the graph is retained. In validation no gradient
    is computed. Without units the result is a zero that is still connected to the leaves.
    """
    _share_readings(terms)
    learned = [term.learned for term in terms if term.learned is not None]
    if torch.is_grad_enabled() and (learned or any(leaf.requires_grad for leaf in source.leaves)):
        return BlockwiseSum(*_BlockwiseSum.apply(source, terms, coefficients, *source.leaves, *learned))
    with torch.no_grad():
        sums = _zeros(source, terms)
        for block in blocks(source, terms):
            logits = _read(source, terms, block)
            for step in block.steps:
                for i, (part, places) in enumerate(step):
                    term_logits = logits[places].narrow(1, 0, terms[i].width)
                    sums[i] += terms[i].sums(term_logits.to(compute_dtype(source)), part)
        return BlockwiseSum(*_totals(source, sums, coefficients))


def _share_readings(terms: Sequence[Term]) -> None:
    """Make terms that read the same rows of a teacher, such as a loss and a metric, read them once."""
    aheads = [ahead for term in terms for ahead in term.aheads if ahead.is_worth_while]
    for i, ahead in enumerate(aheads):
        for earlier in aheads[:i]:
            ahead.share_with(earlier)


class _BlockwiseSum(torch.autograd.Function):
    """Autograd function that computes its gradients in forward and saves them."""

    @staticmethod
    def forward(
        ctx: Any, source: TrainableRows, terms: Sequence[Term], coefficients: Sequence[float], *leaves: Tensor
    ) -> tuple[Tensor, Tensor]:
        try:
            sums, saved = _sums_and_gradients(source, terms, coefficients)
        except KernelError as error:
            if source.share != (0, 1):
                # The other processes of the share have gone on, and wait for this one's part of the next block.
                raise
            give_up(error)
            sums, saved = _sums_and_gradients(source, terms, coefficients)
        ctx.dtypes = [None if gradient is None else leaf.dtype for leaf, gradient in zip(leaves, saved, strict=True)]
        ctx.save_for_backward(*(gradient for gradient in saved if gradient is not None))
        total, of_terms = _totals(source, sums, coefficients)
        ctx.mark_non_differentiable(of_terms)
        return total, of_terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        gradients = (None if dtype is None else scaled(next(saved), grad_output).to(dtype) for dtype in ctx.dtypes)
        return None, None, None, *gradients


def _zeros(source: LogitRows, terms: Sequence[Term]) -> Tensor:
    return torch.zeros(len(terms), 2, dtype=compute_dtype(source), device=source.device)


def _read(source: LogitRows, terms: Sequence[Term], block: Block) -> Tensor:
    """Return the logits of a block [R, X], and announce the block to the rows that are read ahead.

    A block's last step may exceed the usual number of rows. Teacher rows are then read in equal parts, rather than the
    few extra rows by themselves.
    """
    num_rows = len(block.rows)
    num_parts = max(num_rows // rows_at_once(source, terms), 1)
    for i, term in enumerate(terms):
        for ahead in term.aheads:
            ahead.begin(block.units(i), -(-num_rows // num_parts))
    return source.read(block.rows, width_of(terms))


def _sums_and_gradients(
    source: TrainableRows, terms: Sequence[Term], coefficients: Sequence[float]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    sums, gradients = _zeros(source, terms), source.gradients()
    joint = _JointTerms(source, terms, gradients)
    learned = {i: torch.zeros_like(term.learned) for i, term in enumerate(terms) if term.learned is not None}
    for block in blocks(source, terms, joint):
        block_gradient = _BlockGradient(terms, block, gradients, compute_dtype(source), joint, learned)
        logits = _read(source, terms, block)
        for step in block.steps:
            for i, term_sums in block_gradient.add_step(coefficients, step, logits):
                sums[i] += term_sums
        assert block_gradient.total is not None
        gradients.add(block.rows, block_gradient.total, onto=block.overlaps)
    return sums, (*gradients.sums(), *learned.values())


class _BlockGradient:
    """Accumulator of the gradient with respect to the rows of a block [R, X]."""

    def __init__(
        self,
        terms: Sequence[Term],
        block: Block,
        gradients: Gradients,
        dtype: torch.dtype,
        joint: _JointTerms,
        learned: Mapping[int, Tensor],
    ) -> None:
        """Start empty.

        dtype: of the computation. learned: gradient of each term's `learned` tensor, keyed by term, to be added to.
        """
        self._shape, self._gradients, self._dtype = (len(block.rows), width_of(terms)), gradients, dtype
        self._terms, self._joint, self._learned = terms, joint, learned
        is_alone = len(terms) == 1
        self._first = terms[0] if not joint and (is_alone or _first_covers(terms, block)) else None
        """Term that writes before any other term adds, so that the total need not be zeroed."""
        self._is_one = len(terms) == len(block.steps) == 1
        # Rounded immediately if nothing is added to it later.
        is_written_once = joint.are_all or (is_alone and self._is_direct(terms[0]))
        self._total_dtype = gradients.dtype if is_written_once else dtype
        self.total: Tensor | None = None
        """[R, X]; None until something is added."""

    def add_step(self, coefficients: Sequence[float], step: Step, logits: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Add the gradient of Σ coefficient · term over a step's units, and yield each term's index and sums [2]."""
        if self._joint:
            yield from self._joint.add(coefficients, step, logits, self._full_total(logits.device))
        for i, (part, places) in enumerate(step):
            if i not in self._joint:
                term_logits = logits.narrow(1, 0, self._terms[i].width)
                yield i, self._add_term(i, coefficients[i], part, places, term_logits)

    def _add_term(self, i: int, coefficient: float, part: slice, places: slice | Tensor, logits: Tensor) -> Tensor:
        """Add the gradient of coefficient · term over a part's units, and return the term's sums [2]."""
        term = self._terms[i]
        is_first = term is self._first
        if self._is_direct(term):
            columns = self._columns(logits)
            if isinstance(places, slice):
                rows, columns = UnitRows(logits[places], None), columns[places]
            else:
                rows = UnitRows(logits, places)
            return term.add_gradient(rows, part, coefficient, columns, is_first=is_first)
        unit_logits = logits[places].to(self._dtype)
        sums, gradient, learned_gradient = term.sums_and_gradients(unit_logits, part, coefficient)
        if learned_gradient is not None:
            self._learned[i].add_(learned_gradient)
        if self._gradients.pull_back is not None:
            gradient = self._gradients.pull_back(unit_logits, gradient)
        self._add(places, gradient, is_first=is_first)
        return sums

    def _is_direct(self, term: Term) -> bool:
        """Return whether the term's closed form adds its gradient to the total."""
        return term.closed_form is not None and self._gradients.pull_back is None

    def _add(self, places: slice | Tensor, gradient: Tensor, *, is_first: bool) -> None:
        if self._is_one:
            self.total = gradient
        elif isinstance(places, Tensor):
            self._columns(gradient).index_add_(0, places, gradient)
        elif is_first:
            self._columns(gradient)[places] = gradient
        else:
            self._columns(gradient)[places] += gradient

    def _columns(self, like: Tensor) -> Tensor:
        """Return the leading columns of the total, as many as `like` has."""
        return self._full_total(like.device).narrow(1, 0, like.shape[1])

    def _full_total(self, device: torch.device) -> Tensor:
        """Return the total with all columns that `Gradients.add` takes; allocate it first if needed."""
        if self.total is None:
            num_rows, width = self._shape
            columns = self._gradients.columns(width)
            self.total = empty_rows(num_rows, columns, self._total_dtype, device)
            num_written = columns if self._joint.are_all else width if self._first is not None else 0
            if num_written < columns:
                self.total[:, num_written:] = 0
        return self.total


def _first_covers(terms: Sequence[Term], block: Block) -> bool:
    """Return whether the first term covers all rows and columns of a block, each row before any other term does."""
    first, units = terms[0], block.units(0)
    return (
        all(term.begins is None for term in terms)
        and first.width == width_of(terms)
        and first.num_units > 0
        and units.stop - units.start == len(block.rows)
    )


def _totals(source: LogitRows, sums: Tensor, coefficients: Sequence[float]) -> tuple[Tensor, Tensor]:
    sums = source.reduce(sums)
    total = torch.zeros((), dtype=sums.dtype, device=sums.device)
    for weighted, coefficient in zip(sums[:, 0], coefficients, strict=True):
        total = total + coefficient * weighted
    return total, sums


class _JointTerms:
    """Terms that kernels can compute, in groups with at most one term of each form."""

    def __init__(self, source: LogitRows, terms: Sequence[Term], gradients: Gradients) -> None:
        self._terms = terms
        are_used = launch.are_used(source.device, source.dtype) and gradients.pull_back is None
        self._groups = _groups(terms) if are_used else []
        self.are_all = len(self._groups) == 1 and len(self._groups[0]) == len(terms)
        """One group holds all terms, so that each row of a block is computed once, in a single step."""

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __contains__(self, term: object) -> bool:
        return any(term in group for group in self._groups)

    def add(
        self, coefficients: Sequence[float], step: Step, logits: Tensor, total: Tensor
    ) -> Iterable[tuple[int, Tensor]]:
        """Yield each joint term's index and sums [2] over a step; add the gradients to `total`, the block's [R, X].

        Raises KernelError.
        """
        for group in self._groups:
            placed = {i: self._placed(i, coefficients[i], *step[i]) for i in group}
            placed = {i: form for i, form in placed.items() if len(form)}
            losses = add_losses(logits, list(placed.values()), total, is_first=self.are_all) if placed else []
            for i, unit_losses in zip(placed, losses, strict=True):
                yield i, self._terms[i].sums_of(unit_losses, step[i][0])

    def _placed(self, i: int, coefficient: float, units: slice, places: slice | Tensor) -> Placed:
        term = self._terms[i]
        assert term.row_loss is not None
        return Placed(term.row_loss.of(units), places, term.factors(units, coefficient, torch.float32), term.width)


def _groups(terms: Sequence[Term]) -> list[list[int]]:
    groups: list[dict[type, int]] = []
    """Index of the term, keyed by kind."""
    for i, term in enumerate(terms):
        if term.row_loss is None:
            continue
        kind = term.row_loss.kind
        group = next((group for group in groups if kind not in group), None)
        if group is None:
            groups.append(group := {})
        group[kind] = i
    return [list(group.values()) for group in groups]


def compute_dtype(source: LogitRows) -> torch.dtype:
    """Return fp32, or fp64 for fp64 logits."""
    return torch.promote_types(source.dtype, torch.float32)


def backward(loss: Tensor) -> None:
    """Run backward from a scalar with a 1 whose value the host knows, so that `scaled` need not multiply."""
    loss.backward(_one(loss.device, loss.dtype))


def scaled(saved: Tensor, factor: Tensor) -> Tensor:
    """Compute saved · factor in backward, in place unless the graph is retained."""
    # PyTorch's own compiled functions check the same before they donate buffers.
    is_retained = torch._C._autograd._get_current_graph_task_keep_graph()
    if is_retained:
        return saved * factor
    return saved if _is_one(factor) else saved.mul_(factor)


@cache
def _one(device: torch.device, dtype: torch.dtype) -> Tensor:
    (one,) = to_device_batched([torch.ones((), dtype=dtype)], device)
    return one


def _is_one(factor: Tensor) -> bool:
    """Return whether the host knows, without waiting for the device, that a factor is 1."""
    host_factor = on_host(factor)
    return host_factor is not None and host_factor.numel() == 1 and host_factor.item() == 1
