"""A sum of losses over units, computed a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nemo_opd.kernels.forms import RowLoss
from nemo_opd.logits.head import ReadAhead

ChunkLoss = Callable[[Tensor, slice], Tensor]
"""(logits [R, X] in the compute dtype, slice of units) → the loss of each unit, [u].

A unit may have several rows. The slice may be empty.
"""


@dataclass(frozen=True, slots=True)
class UnitRows:
    """Logits/τ of units with one row each, selected from a block inside compiled functions, so without a copy."""

    of_block: Tensor
    """[R, X]: logits of the block."""
    places: Tensor | None
    """int64 [u]: unique rows of the units in the block. None stands for all rows in order."""
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.of_block if self.places is None else self.places)

    def over(self, temperature: float) -> UnitRows:
        return replace(self, temperature=temperature)

    def gather(self) -> Tensor:
        """Return logits/τ [u, X] in the compute dtype; may be a view, which the caller must not write to."""
        rows = self.of_block if self.places is None else self.of_block.index_select(0, self.places)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return rows if self.temperature == 1 else rows / self.temperature


@dataclass(frozen=True, slots=True)
class GradientSink:
    """Accumulator of the gradient of Σ factor · loss over units with one row each."""

    total: Tensor
    """[R, X]: gradient of the block, to be added to."""
    places: Tensor | None
    """Rows of the units, as in `UnitRows`."""
    factors: Tensor
    """[u, 1]"""
    is_first: bool
    """Nothing has been written to `total` yet."""

    def over(self, temperature: float) -> GradientSink:
        """Return the accumulator for gradients with respect to logits/τ."""
        return self if temperature == 1 else replace(self, factors=self.factors / temperature)

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of the losses [u, X], which may be overwritten."""
        if self.places is not None:
            self.total.index_add_(0, self.places, gradient.mul_(self.factors))
        elif self.is_first:
            torch.mul(gradient, self.factors, out=self.total)
        else:
            self.total.addcmul_(gradient, self.factors)


ClosedForm = Callable[[UnitRows, slice, GradientSink], Tensor]
"""(logits of units, slice of units, accumulator of their gradient) → losses of units in the compute dtype, [u]."""


@dataclass(frozen=True, slots=True)
class Term:
    """Σ factor · weight · loss over units."""

    rows: Tensor
    """int64 [R]: unique rows of [B·S] that the units need; ascending if several terms are computed together."""
    loss_of: ChunkLoss
    """Loss function. It closes over and slices its other inputs (teacher logits, targets), which get no gradient."""
    cells: Sequence[int]
    """[U + 1]: cumulative fp32 numbers that the units need at a block's peak; see `unit_cells`."""
    width: int
    """Number of leading columns it reads."""
    begins: Sequence[int] | None = None
    """[U + 1]: index of each unit's first row, on the host, which cuts units; by default each unit has one row."""
    weights: Tensor | None = None
    """[U], by default all 1."""
    factor: float = 1.0
    chunk_size: int | None = None
    """Units computed at a time; by default as many as fit a byte budget."""
    ahead: ReadAhead | None = None
    """Teacher rows that `loss_of` reads, in the order of units; told about each block before it is computed."""
    further_aheads: Sequence[ReadAhead] = ()
    """More of them, such as several teacher positions of a chunk."""
    closed_form: ClosedForm | None = None
    """Function that computes loss and gradient of units with one row each; by default autograd is used."""
    row_loss: RowLoss | None = None
    """Form for kernels, which compute several terms together."""
    learned: Tensor | None = None
    """Tensor that `loss_of` reads and that also gets a gradient; such a term has no closed form and no kernel."""

    @property
    def num_units(self) -> int:
        return len(self.cells) - 1

    @property
    def aheads(self) -> list[ReadAhead]:
        """All rows it reads in addition to the student's."""
        return [*([] if self.ahead is None else [self.ahead]), *self.further_aheads]

    def times(self, factor: float) -> Term:
        return replace(self, factor=self.factor * factor)

    def span(self, units: slice) -> slice:
        """Return the slice of rows of a slice of units."""
        return units if self.begins is None else slice(self.begins[units.start], self.begins[units.stop])

    def sums(self, logits: Tensor, part: slice) -> Tensor:
        """Compute the weighted and unweighted sums [2] over a part's units."""
        return self.sums_of(self.loss_of(logits, part), part)

    def sums_of(self, losses: Tensor, part: slice) -> Tensor:
        """Sum the losses [u] of a part's units, weighted and unweighted, [2]."""
        unweighted = losses.sum()
        total = unweighted if self.weights is None else (losses * self.weights[part]).sum()
        return torch.stack([total, unweighted]) * self.factor

    def add_gradient(self, rows: UnitRows, part: slice, coefficient: float, total: Tensor, *, is_first: bool) -> Tensor:
        """Return sums [2], and add the gradient by the closed form to `total`, the block's [R, X]."""
        assert self.closed_form is not None
        factors = self.factors(part, coefficient, torch.promote_types(rows.of_block.dtype, torch.float32)).unsqueeze(1)
        return self.sums_of(self.closed_form(rows, part, GradientSink(total, rows.places, factors, is_first)), part)

    def factors(self, part: slice, coefficient: float, dtype: torch.dtype) -> Tensor:
        """Return the factor of each unit's loss in a part, [u]."""
        factor = coefficient * self.factor
        if self.weights is None:
            return torch.full((part.stop - part.start,), factor, dtype=dtype, device=self.rows.device)
        return factor * self.weights[part].to(dtype)

    def sums_and_gradients(
        self, logits: Tensor, part: slice, coefficient: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute sums [2], and the gradients of coefficient · sums[0] with respect to logits [R, X] and `learned`.

        The caller's saved-tensor hooks (offloading, accounting) do not apply: a block's tensors do not outlive forward.
        """
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            leaf = logits.detach().requires_grad_()
            sums = self.sums(leaf, part)
            leaves = (leaf,) if self.learned is None else (leaf, self.learned)
            gradient, *learned_gradient = torch.autograd.grad(sums[0] * coefficient, leaves)
        return sums.detach(), gradient, learned_gradient[0] if learned_gradient else None


def width_of(terms: Sequence[Term]) -> int:
    """Return the number of leading columns that terms read."""
    return max(term.width for term in terms)


def unit_cells(num_units: int, cells_per_unit: int, *positions: tuple[Sequence[int], int]) -> Sequence[int]:
    """Return the cumulative cells [U + 1] of units with `cells_per_unit` each, plus cells for their positions.

    positions: pairs of the index of each unit's first position [U + 1] and the cells per position.
    """
    unit_totals = range(0, (num_units + 1) * cells_per_unit, cells_per_unit)
    if not positions:
        return unit_totals
    return [cells + sum(begins[i] * size for begins, size in positions) for i, cells in enumerate(unit_totals)]


def _same(tensor: Tensor) -> Tensor:
    return tensor
