"""Logits computed from hidden states and a head (methods.md §8.2, §9), by products with fp32 results (§8.3).

The logits of a student and a teacher that nearly agree differ by less than bf16 resolves: between 16 and 32 its numbers
are 0.125 apart, which alone makes a KL of up to 0.125²/12 nats a token. The sums are accumulated in fp32 anyway; the
precision is lost when they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.logits.rows import ALIGNMENT, Gradients, TrainableRows, empty_rows, kept_dtype, new_leaf, row_distance

_LARGEST_FP16_EXPONENT = 14
"""Exponent of a gradient's largest entry after scaling, before it is rounded to fp16."""
_SMALLEST_EXPONENT = -100
"""Exponent below which a gradient is not scaled up in full: the factor must stay a normal fp32 number."""
_UPCAST_BYTES = 2 * 2**20
"""Bytes of the head that are cast to fp32 at a time on devices without such a product: they fit a cache, so that
128 rows take as long as with an fp32 head; with 4 MiB they take a third longer.
"""


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
        self.dtype = _product_dtype(hidden.dtype, head.weight.dtype)

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


def _before_soft_cap(head: Head, logits: Tensor, gradient: Tensor) -> Tensor:
    """Turn a gradient with respect to logits into one with respect to the linear layer's output."""
    if head.soft_cap is not None:
        gradient = gradient * (1 - (logits / head.soft_cap).square())
    return gradient if head.scale == 1 else gradient * head.scale


class _HeadGradients(Gradients):
    """Gradients of hidden states, weight and bias.

    The gradient with respect to logits is rounded to the dtype of hidden states and head if it is the same for both.
    The products with head and hidden states average the independent relative errors out: unlike logits, the gradient
    is not a small difference of large numbers.
    """

    def __init__(self, hidden: Tensor, head: Head) -> None:
        self._head, self._hidden = head, hidden.detach().flatten(0, 1)
        self.pull_back = None if head.soft_cap is None and head.scale == 1 else partial(_before_soft_cap, head)
        self._shape = hidden.shape
        is_same_dtype = hidden.dtype == head.weight.dtype
        self._operand_dtype = hidden.dtype if is_same_dtype else _product_dtype(hidden.dtype, head.weight.dtype)
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
            row_gradient = _scaled_product(gradient, weight, factor).to(self._hidden_gradient.dtype)
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
            total = _add_product(total, gradient, hidden)
        else:
            added = _scaled_product(gradient, hidden, factor)
            total = added if total is None else total.add_(added)
        if self._weight_gradient is None:
            self._weight_gradient = total

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


def _scaled_product(a: Tensor, b: Tensor, factor: Tensor | None) -> Tensor:
    """Compute a @ b · factor; in bf16 for bf16 operands, unless cut, since the result is rounded to bf16 anyway."""
    if factor is None and a.dtype == b.dtype and not (len(_parts_of_inner(a, b)) > 1 and _sums_in_fp32(a)):
        return a @ b
    result = product(a, b)
    return result if factor is None else result.mul_(factor)


def _fp32_zeros(leaf: Tensor) -> Tensor:
    return torch.zeros(leaf.shape, dtype=torch.promote_types(leaf.dtype, torch.float32), device=leaf.device)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute W h + bias, aligned rows [R, X] in the `_product_dtype`, from rows [R, D], weight [X, D] and bias [X]."""
    dtype = _product_dtype(hidden.dtype, weight.dtype)
    logits = empty_rows(len(hidden), len(weight), dtype, hidden.device)
    if bias is not None and hidden.dtype == weight.dtype == dtype:
        return torch.addmm(bias, hidden, weight.t(), out=logits)
    product(hidden, weight.t(), logits)
    return logits if bias is None else logits.add_(bias)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute a @ b, [R, D] and [D, X] → [R, X] in the `_product_dtype`, without a graph.

    Exact except for the rounding of fp32 sums: the product of two bf16 or two fp16 numbers is an fp32 number. Operands
    may have different dtypes. out: rows for the result, with any stride.
    """
    dtype = _product_dtype(a.dtype, b.dtype)
    if a.dtype == b.dtype and _sums_in_fp32(a):
        if out is None:
            out = a.new_empty(len(a), b.shape[1], dtype=dtype)
        return _multiply(a, b, out, is_added=False)
    return _upcast_product(a.to(dtype), b, out)


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, is_added: bool) -> Tensor:
    """Write a @ b to `out`, or add it, in parts whose sizes suit a GPU. Operands have the same dtype."""
    wider: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    for rows in _parts(len(a), a.device, is_innermost=a.stride(0) == 1):
        for columns in _parts(b.shape[1], a.device, is_innermost=True):
            target = out[rows, columns]
            for i, inner in enumerate(_parts_of_inner(a, b)):
                if is_added or i > 0:
                    torch.addmm(target, a[rows, inner], b[inner, columns], out=target, **wider)
                else:
                    torch.mm(a[rows, inner], b[inner, columns], out=target, **wider)
    return out


def _parts_of_inner(a: Tensor, b: Tensor) -> list[slice]:
    return _parts(len(b), a.device, is_innermost=a.stride(1) == 1 or b.stride(0) == 1)


def _parts(size: int, device: torch.device, *, is_innermost: bool) -> list[slice]:
    """Cut a size of matrices on a GPU into a multiple of 64 and the rest, if 8 does not divide it.

    On an H100 cuBLAS takes seven times as long for 151,669 columns as for 151,616 and 53, wherever their rows begin.
    is_innermost: numbers along this size are neighbours in memory, in some matrix of the product.
    """
    whole = size - size % ALIGNMENT
    if not is_innermost or size % 8 == 0 or whole == 0 or not _is_cut(device):
        return [slice(0, size)]
    return [slice(0, whole), slice(whole, size)]


def _is_cut(device: torch.device) -> bool:
    return device.type != "cpu"


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Compute total + a @ b, in place if there is a total, which is at least fp32; without one it is 0.

    Sums are accumulated in fp32. On devices without such products of bf16 or fp16, a @ b is rounded to that
    dtype first.
    """
    dtype = _product_dtype(a.dtype, b.dtype)
    if a.dtype != b.dtype or _is_native(a.device.type, a.dtype):
        if total is None:
            return product(a, b)
        if a.dtype == b.dtype != dtype:
            return _multiply(a, b, total, is_added=True)
        return total.add_(product(a, b))
    if total is None:
        return (a @ b).to(dtype)
    return total.addmm_(a, b) if a.dtype == dtype else total.add_(a @ b)


def _product_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype of `product`: the promoted dtype of the operands, at least fp32."""
    return torch.promote_types(torch.promote_types(a, b), torch.float32)


def _sums_in_fp32(operand: Tensor) -> bool:
    """Return whether products of this dtype have at least fp32 results, without a copy of the operands."""
    return operand.dtype.itemsize >= torch.float32.itemsize or _is_native(operand.device.type, operand.dtype)


@cache
def _is_native(device: str, dtype: torch.dtype) -> bool:
    """Try whether products with fp32 output work on a device: not every build of PyTorch for GPUs has them."""
    one = torch.ones(1, 1, dtype=dtype, device=device)
    try:
        total = torch.mm(one, one, out_dtype=torch.float32, out=torch.empty(1, 1, device=device))
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _upcast_product(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    """Compute the product with a few columns of `b` at a time, upcast to the dtype of `a`."""
    result = a.new_empty(len(a), b.shape[1]) if out is None else out
    step = max(1, _UPCAST_BYTES // (a.dtype.itemsize * max(1, len(b))))
    for start in range(0, b.shape[1], step):
        columns = slice(start, start + step)
        torch.mm(a, b[:, columns].to(a.dtype), out=result[:, columns])
    return result
