"""Logits computed from hidden states and a head (methods.md §8.2, §9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import on_host
from nemo_opd.errors import ConfigError
from nemo_opd.logits.product import add_product, empty_rows, linear, product, product_dtype, row_distance
from nemo_opd.logits.rows import Gradients, LogitRows, TrainableRows, kept_dtype, new_leaf

_LARGEST_FP16_EXPONENT = 14
"""Exponent of a gradient's largest entry after scaling, before it is rounded to fp16."""
_SMALLEST_EXPONENT = -100
"""Exponent below which a gradient is not scaled up in full: the factor must stay a normal fp32 number."""


@dataclass(frozen=True, eq=False, slots=True)
class Head:
    """Map from hidden states to logits: soft_cap · tanh(scale · (W h + bias) / soft_cap)."""

    weight: Tensor
    """[X, D]"""
    bias: Tensor | None = None
    """[X]"""
    scale: float = 1.0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ConfigError(
                f"a head with weight {list(self.weight.shape)} has a bias {list(self.bias.shape)}; "
                f"give {list(self.weight.shape[:1])}"
            )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ConfigError(f"soft_cap={self.soft_cap}: logits are divided by it; give a number above 0, or none")

    def columns(self, width: int) -> int:
        """Return how many columns to compute for `width` of them: on a GPU rounded up, so that rows are aligned."""
        return min(len(self.weight), row_distance(width, self.weight.device))

    def after_linear(self, linear: Tensor) -> Tensor:
        """Apply scale and soft-cap to W h + bias [..., X] in at least fp32; return it unchanged if there is neither."""
        if self.scale == 1 and self.soft_cap is None:
            return linear
        logits = linear.to(torch.promote_types(linear.dtype, torch.float32)) * self.scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


class HeadLogits(TrainableRows):
    """Logits computed by a head from hidden states [B, S, D] in chunks, so that they are never all in memory.

    Logits are in at least fp32, whatever the dtypes of hidden states and head. Hidden states, weight and bias each get
    a gradient if they require one; the weight's is summed over chunks in fp32.
    """

    def __init__(self, hidden: Tensor, head: Head) -> None:
        """Raise ConfigError if the widths of hidden states and head differ."""
        if hidden.shape[-1] != head.weight.shape[1]:
            raise ConfigError(
                f"hidden states are {list(hidden.shape)}, the head's weight {list(head.weight.shape)}; the last sizes "
                "must be equal"
            )
        self.hidden, self.head = hidden, head
        self.leaves = (hidden, head.weight) if head.bias is None else (hidden, head.weight, head.bias)
        self.shape = (hidden.shape[0], hidden.shape[1], len(head.weight))
        self.device, self.is_product = hidden.device, True
        self.dtype = product_dtype(hidden.dtype, head.weight.dtype)

    @torch.no_grad()
    def read(self, rows: Tensor, width: int) -> Tensor:
        head, columns = self.head, self.head.columns(width)
        bias = None if head.bias is None else head.bias[:columns]
        hidden = self.hidden.flatten(0, 1).index_select(0, rows)
        return head.after_linear(linear(hidden, head.weight[:columns], bias))[:, :width]

    def gradients(self) -> Gradients:
        return _HeadGradients(self.hidden, self.head)

    def cut_off(self) -> HeadLogits:
        """Return these logits as a new leaf, which accumulates gradients before they go back through a model."""
        return HeadLogits(new_leaf(self.hidden), self.head)


class _HeadGradients(Gradients):
    """Gradients of hidden states, weight and bias.

    The gradient with respect to logits is rounded to the dtype of hidden states and head if it is the same for both.
    The products with head and hidden states average the independent relative errors out: unlike logits, the gradient
    is not a small difference of large numbers.
    """

    def __init__(self, hidden: Tensor, head: Head) -> None:
        self._head, self._hidden = head, hidden.detach().flatten(0, 1)
        self.pulls_back = head.soft_cap is not None or head.scale != 1
        self._shape = hidden.shape
        is_same_dtype = hidden.dtype == head.weight.dtype
        self._operand_dtype = hidden.dtype if is_same_dtype else product_dtype(hidden.dtype, head.weight.dtype)
        self.dtype = kept_dtype(self._operand_dtype)
        self._hidden_gradient = (
            torch.zeros_like(self._hidden, dtype=kept_dtype(hidden.dtype)) if hidden.requires_grad else None
        )
        self._weight_gradient: Tensor | None = None
        """fp32 [X, D]; None until something is added."""
        self._bias_gradient = None if head.bias is None or not head.bias.requires_grad else _fp32_zeros(head.bias)

    def columns(self, width: int) -> int:
        return self._head.columns(width)

    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        if self._bias_gradient is not None:
            self._bias_gradient[: gradient.shape[1]] += gradient.sum(0, dtype=self._bias_gradient.dtype)
        factor = None
        if self._operand_dtype == torch.float16:
            gradient, factor = _scale_to_fp16(gradient)
        gradient = self._as_operand(gradient)
        weight = self._head.weight.detach()[: gradient.shape[1]]
        if self._hidden_gradient is not None:
            row_gradient = _product(gradient, weight, factor).to(self._hidden_gradient.dtype)
            write = self._hidden_gradient.index_add_ if onto else self._hidden_gradient.index_copy_
            write(0, rows, row_gradient)
        if self._head.weight.requires_grad:
            self._add_to_weight(gradient.t(), self._hidden.index_select(0, rows), factor)

    def _as_operand(self, gradient: Tensor) -> Tensor:
        """Return the gradient in the products' dtype, padded with zero columns to their width."""
        width = gradient.shape[1]
        columns = self.columns(width)
        if gradient.dtype == self._operand_dtype and width == columns:
            return gradient
        operand = empty_rows(len(gradient), columns, self._operand_dtype, gradient.device)
        operand[:, :width] = gradient
        if width < columns:
            operand[:, width:] = 0
        return operand

    def _add_to_weight(self, gradient: Tensor, hidden: Tensor, factor: Tensor | None) -> None:
        """Add the product [width, R] @ [R, D] to the leading rows of the weight's gradient."""
        width = len(gradient)
        if self._weight_gradient is None and width < len(self._head.weight):
            self._weight_gradient = _fp32_zeros(self._head.weight)
        total = None if self._weight_gradient is None else self._weight_gradient[:width]
        if factor is None:
            total = add_product(total, gradient, hidden)
        else:
            added = _product(gradient, hidden, factor)
            total = added if total is None else total.add_(added)
        if self._weight_gradient is None:
            self._weight_gradient = total

    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        if self._head.soft_cap is not None:
            gradient = gradient * (1 - (logits / self._head.soft_cap).square())
        return gradient if self._head.scale == 1 else gradient * self._head.scale

    def sums(self) -> tuple[Tensor | None, ...]:
        hidden = None if self._hidden_gradient is None else self._hidden_gradient.view(self._shape)
        weight = None
        if self._head.weight.requires_grad:
            weight = _fp32_zeros(self._head.weight) if self._weight_gradient is None else self._weight_gradient
            weight = weight.to(kept_dtype(self._head.weight.dtype))
        if self._head.bias is None:
            return hidden, weight
        bias = None if self._bias_gradient is None else self._bias_gradient.to(kept_dtype(self._head.bias.dtype))
        return hidden, weight, bias


def _scale_to_fp16(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Scale a gradient into the range of fp16; return it and the scalar power of two that undoes the scaling."""
    exponent = gradient.abs().amax().frexp().exponent if gradient.numel() else gradient.new_zeros((), dtype=torch.int32)
    factor = torch.ldexp(gradient.new_ones(()), exponent.clamp(min=_SMALLEST_EXPONENT) - _LARGEST_FP16_EXPONENT)
    return gradient / factor, factor


def _product(a: Tensor, b: Tensor, factor: Tensor | None) -> Tensor:
    """Compute a @ b · factor; in bf16 for bf16 operands, since the result is rounded to bf16 anyway."""
    if factor is None and a.dtype == b.dtype:
        return a @ b
    result = product(a, b)
    return result if factor is None else result.mul_(factor)


def _fp32_zeros(leaf: Tensor) -> Tensor:
    return torch.zeros(leaf.shape, dtype=torch.promote_types(leaf.dtype, torch.float32), device=leaf.device)


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
        self._block = self._span(units)
        self._rows_at_once = rows_at_once if self.is_worth_while else 0
        self._reading.rows = None
        self._reading.finished.clear()

    def of(self, units: slice) -> Tensor:
        """Return the rows of consecutive units [r, width] in the source's dtype. The caller must not write to them."""
        span = self._span(units)
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

    def _span(self, units: slice) -> slice:
        return units if self._begins is None else slice(self._begins[units.start], self._begins[units.stop])
