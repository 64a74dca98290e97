"""A sum of losses over units, to be taken a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nemo_opd.kernels.forms import RowLoss
from nemo_opd.logits.read_ahead import ReadAhead

ChunkLoss = Callable[[Tensor, slice], Tensor]
"""(logits [R, X] in the compute dtype, which units they are of) → the loss of each unit, [u].

A unit may have several rows. There may be no unit at all.
"""


@dataclass(frozen=True, slots=True)
class UnitRows:
    """Logits/τ of units of one row each, among those of a block: taken inside of compiled functions, without a copy."""

    of_block: Tensor
    """[R, X]"""
    places: Tensor | None
    """int64 [u]: the rows of the units, none of them twice; None: all, in order."""
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.of_block if self.places is None else self.places)

    def over(self, temperature: float) -> UnitRows:
        return replace(self, temperature=temperature)

    def taken(self) -> Tensor:
        """Return them as [u, X] in the compute dtype, maybe a view, not to be written."""
        rows = self.of_block if self.places is None else self.of_block.index_select(0, self.places)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return rows if self.temperature == 1 else rows / self.temperature


@dataclass(frozen=True, slots=True)
class Onto:
    """A place for the gradient of Σ factor · loss over units of one row each."""

    total: Tensor
    """[R, X]: of a block, to be added to."""
    places: Tensor | None
    """Rows of the units, as in `UnitRows`."""
    factors: Tensor
    """[u, 1]"""
    is_first: bool
    """Nothing has been put there yet."""

    def over(self, temperature: float) -> Onto:
        """Return the place for the gradient with respect to logits/τ."""
        return self if temperature == 1 else replace(self, factors=self.factors / temperature)

    def add(self, gradient: Tensor) -> None:
        """Add the gradient [u, X] of the losses, which may be written to."""
        if self.places is not None:
            self.total.index_add_(0, self.places, gradient.mul_(self.factors))
        elif self.is_first:
            torch.mul(gradient, self.factors, out=self.total)
        else:
            self.total.addcmul_(gradient, self.factors)


ClosedForm = Callable[[UnitRows, slice, Onto], Tensor]
"""(logits of units, which units they are, where their gradient goes) → losses of units in the compute dtype, [u]."""


@dataclass(frozen=True, slots=True)
class Term:
    """Σ factor · weight · loss over units."""

    rows: Tensor
    """int64 [R]: those of [B·S] that the units need, none of them twice; ascending where terms are taken together."""
    loss_of: ChunkLoss
    """Whatever else it reads (teacher logits, targets) it closes over and slices itself; that gets no gradient."""
    cells: Sequence[int]
    """[U + 1]: fp32 numbers that the units before each take at the peak of a block; see `unit_cells`."""
    width: int
    """Leading columns that it reads."""
    begins: Sequence[int] | None = None
    """[U + 1]: where units begin among the rows, on the host, since they are cut there; None: each has one row."""
    weights: Tensor | None = None
    """[U]; None: all 1."""
    factor: float = 1.0
    chunk_size: int | None = None
    """Units taken at a time; None: as many as fit a byte budget."""
    ahead: ReadAhead | None = None
    """Other rows that `loss_of` reads, in the order of units, and is passed for each block of them."""
    further_aheads: Sequence[ReadAhead] = ()
    """More of these, such as several teacher positions of a chunk."""
    closed_form: ClosedForm | None = None
    """Computes loss and gradient at once, where a unit has one row; None: the gradient is formed by autograd."""
    row_loss: RowLoss | None = None
    """The same for kernels, which compute several terms together."""
    learned: Tensor | None = None
    """A tensor that `loss_of` reads and that gets a gradient too; such a term has no closed form and no kernel."""

    @property
    def num_units(self) -> int:
        return len(self.cells) - 1

    @property
    def aheads(self) -> list[ReadAhead]:
        """All rows that it reads in addition to the student's."""
        return [*([] if self.ahead is None else [self.ahead]), *self.further_aheads]

    def times(self, factor: float) -> Term:
        return replace(self, factor=self.factor * factor)

    def span(self, units: slice) -> slice:
        """Return the slice of rows of a slice of units."""
        return units if self.begins is None else slice(self.begins[units.start], self.begins[units.stop])

    def sums(self, logits: Tensor, part: slice) -> Tensor:
        """Compute the sums over a part's units, weighted and unweighted: [2]."""
        return self.sums_of(self.loss_of(logits, part), part)

    def sums_of(self, losses: Tensor, part: slice) -> Tensor:
        """Sum the losses [u] of a part's units, weighted and unweighted: [2]."""
        unweighted = losses.sum()
        total = unweighted if self.weights is None else (losses * self.weights[part]).sum()
        return torch.stack([total, unweighted]) * self.factor

    def add_gradient(self, rows: UnitRows, part: slice, coefficient: float, total: Tensor, *, is_first: bool) -> Tensor:
        """Return sums [2], and add their gradient to that of a block [R, X] by the closed form."""
        assert self.closed_form is not None
        factors = self.factors(part, coefficient, torch.promote_types(rows.of_block.dtype, torch.float32)).unsqueeze(1)
        return self.sums_of(self.closed_form(rows, part, Onto(total, rows.places, factors, is_first)), part)

    def factors(self, part: slice, coefficient: float, dtype: torch.dtype) -> Tensor:
        """Return what the loss of each of a part's units is multiplied with, [u]."""
        factor = coefficient * self.factor
        if self.weights is None:
            return torch.full((part.stop - part.start,), factor, dtype=dtype, device=self.rows.device)
        return factor * self.weights[part].to(dtype)

    def sums_and_gradients(
        self, logits: Tensor, part: slice, coefficient: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute sums [2], and the gradients of coefficient · the first by the logits [R, X] and by `learned`.

        A caller's saved-tensor hooks (offloading, accounting) are for what outlives forward; they do not see a block.
        """
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            leaf = logits.detach().requires_grad_()
            sums = self.sums(leaf, part)
            leaves = (leaf,) if self.learned is None else (leaf, self.learned)
            gradient, *of_learned = torch.autograd.grad(sums[0] * coefficient, leaves)
        return sums.detach(), gradient, of_learned[0] if of_learned else None


def width_of(terms: Sequence[Term]) -> int:
    """Return the number of leading columns that terms read."""
    return max(term.width for term in terms)


def unit_cells(num_units: int, cells_per_unit: int, *positions: tuple[Sequence[int], int]) -> Sequence[int]:
    """Count the cells of units that take `cells_per_unit` each and, for further positions, more.

    positions: where units begin among them [U + 1], and the cells that one takes.
    """
    each = range(0, (num_units + 1) * cells_per_unit, cells_per_unit)
    if not positions:
        return each
    return [cells + sum(begin[i] * size for begin, size in positions) for i, cells in enumerate(each)]


def _same(tensor: Tensor) -> Tensor:
    return tensor
