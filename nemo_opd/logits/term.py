"""A sum of losses over units, computed a block of rows at a time, and the reader of the teacher rows that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nemo_opd.distributed.transfer import on_host
from nemo_opd.kernels.forms import RowLoss
from nemo_opd.logits.rows import LogitRows, empty_rows

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
        elif not self.is_first:
            self.total.addcmul_(gradient, self.factors)
        elif torch.compiler.is_compiling():  # Dynamo takes no strided `out`, as aligned rows are
            self.total.copy_(gradient * self.factors)
        else:
            torch.mul(gradient, self.factors, out=self.total)


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
    recorded_at: Tensor | None = None
    """int64 [U]: tokens, indices into [B·S], that losses of units are recorded at; by default the first that is
    predicted.
    """

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

    def first_of_units(self, rows: Tensor) -> Tensor:
        """Return each unit's first row: int64 [U], of `rows`, on any device."""
        if self.begins is None:
            return rows
        return rows[torch.tensor(self.begins[:-1], dtype=torch.int64, device=rows.device)]

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


class ReadAhead:
    """Rows of a source in the order of a term's units, read in large parts while a block is computed in small steps.

    Holds the rows of one read, at most as many as announced, and releases them after the last.
    """

    def __init__(self, source: LogitRows, rows: Tensor, width: int, begins: Sequence[int] | None = None) -> None:
        """Prepare to read.

        rows: int64 [R], indices into [B·T], in the order of the units. width: leading columns. begins: [U + 1] on the
        host, index of each unit's first row; by default each unit has one row.
        """
        self._source, self._rows, self._width, self._begins = source, rows, width, begins
        self.row_bytes = width * source.dtype.itemsize
        # Processes that read a source collectively must read it equally often.
        self.is_worth_while = source.is_product and source.share == (0, 1)
        self._block, self._rows_at_once = slice(0, 0), 0
        self._reading = _Reading()
        self.watch: Callable[[slice, Tensor], None] | None = None
        """Called with a slice of units and their rows whenever these are returned, such as to measure the rows."""

    def first_rows(self, units: Tensor) -> Tensor:
        """Return the index of the first row of each unit: int64 [X] → [X]."""
        return units if self._begins is None else torch.tensor(self._begins, device=units.device)[units]

    def is_shared_with(self, ahead: ReadAhead) -> bool:
        """Return whether both share the rows that they have read."""
        return self._reading is ahead._reading

    def share_with(self, earlier: ReadAhead) -> None:
        """Use the rows that `earlier` reads, if the host knows that both read the same rows."""
        if self.is_shared_with(earlier) or self._source is not earlier._source or self._width != earlier._width:
            return
        rows, earlier_rows = on_host(self._rows), on_host(earlier._rows)
        if rows is not None and earlier_rows is not None and torch.equal(rows, earlier_rows):
            self._reading = earlier._reading
            self._reading.num_readers += 1

    def begin(self, units: slice, rows_at_once: int) -> None:
        """Announce the units that are read next, in consecutive parts. rows_at_once: maximum rows to hold."""
        self._block = self.span(units)
        self._rows_at_once = rows_at_once if self.is_worth_while else 0
        self._reading.rows = None
        self._reading.finished.clear()

    def of(self, units: slice) -> Tensor:
        """Return the rows of consecutive units [r, width] in the source's dtype. The caller must not write to them."""
        rows = self._rows_of(units)
        if self.watch is not None:
            self.watch(units, rows)
        return rows

    def _rows_of(self, units: slice) -> Tensor:
        span = self.span(units)
        is_announced = self._block.start <= span.start and span.stop <= self._block.stop
        most = self._rows_at_once if self._reading.num_readers > 1 else self._rows_at_once - 1
        if not is_announced or span.stop - span.start > most:
            return self._source.read(self._rows[span], self._width)
        return self._read_ahead(span)

    def _read_ahead(self, span: slice) -> Tensor:
        """Return rows of the announced block from the held rows; read the next rows if some are missing."""
        reading = self._reading
        if reading.rows is None or not reading.start <= span.start <= reading.stop:
            self._read_from(span.start)
        held = self._take(span.start, min(span.stop, reading.stop))
        if span.stop <= reading.stop:
            return held
        # Copied first, so that the held rows are freed before the next are read.
        joined = empty_rows(span.stop - span.start, self._width, held.dtype, held.device)
        joined[: len(held)] = held
        del held
        middle = reading.stop
        self._read_from(middle)
        joined[middle - span.start :] = self._take(middle, span.stop)
        return joined

    def _read_from(self, start: int) -> None:
        """Replace the held rows by as many as announced, from row `start` on."""
        reading = self._reading
        reading.rows = None
        reading.start, reading.stop = start, min(start + self._rows_at_once, self._block.stop)
        reading.rows = self._source.read(self._rows[start : reading.stop], self._width)

    def _take(self, start: int, stop: int) -> Tensor:
        """Return held rows, and release the reading once all readers have taken the last row of the block."""
        reading = self._reading
        assert reading.rows is not None
        rows = reading.rows[start - reading.start : stop - reading.start]
        if stop == self._block.stop:
            reading.finished.add(id(self))
            if len(reading.finished) == reading.num_readers:
                reading.rows = None
        return rows

    def span(self, units: slice) -> slice:
        """Return the slice of its rows of a slice of units."""
        return units if self._begins is None else slice(self._begins[units.start], self._begins[units.stop])


@dataclass(slots=True)
class _Reading:
    """Rows of one product with a head, shared by all readers of the same rows."""

    rows: Tensor | None = None
    """[stop − start, width]; None if not read yet or no longer needed."""
    start: int = 0
    stop: int = 0
    num_readers: int = 1
    finished: set[int] = field(default_factory=set)
    """Ids of the readers that have read the last row of the block."""
