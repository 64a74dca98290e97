"""Products of bf16 or fp16 matrices with fp32 results (methods.md §8.3).

The logits of a student and a teacher that nearly agree differ by less than bf16 resolves: between 16 and 32 its numbers
are 0.125 apart, which alone makes a KL of up to 0.125²/12 nats a token. The sums are accumulated in fp32 anyway; the
precision is lost when they are stored.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Row strides are multiples of this many numbers: 128 bytes in 16 bits.

If rows are not aligned to 16 bytes, as with Qwen3's 151,669 columns, cuBLAS falls back to kernels of earlier GPUs, and
Triton's kernels load one number at a time.
"""


def row_distance(width: int, device: torch.device) -> int:
    """Return the stride of rows of `width` numbers."""
    return width if device.type == "cpu" else -(-width // _ALIGNMENT) * _ALIGNMENT


def empty_rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised rows [R, width] with this stride."""
    return torch.empty(num_rows, row_distance(width, device), dtype=dtype, device=device)[:, :width]


_UPCAST_BYTES = 2 * 2**20
"""Bytes of the head that are cast to fp32 at a time on devices without such a product: they fit a cache, so that
128 rows take as long as with an fp32 head; with 4 MiB they take a third longer.
"""


def product_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype of `product`: the promoted dtype of the operands, at least fp32."""
    return torch.promote_types(torch.promote_types(a, b), torch.float32)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute a @ b, [R, D] and [D, X] → [R, X] in the `product_dtype`, without a graph.

    Exact except for the rounding of fp32 sums: the product of two bf16 or two fp16 numbers is an fp32 number. Operands
    may have different dtypes. out: rows for the result, with any stride.
    """
    dtype = product_dtype(a.dtype, b.dtype)
    if a.dtype == b.dtype == dtype:
        return torch.mm(a, b, out=out)
    if a.dtype == b.dtype and _is_native(a.device.type, a.dtype):
        return torch.mm(a, b, out_dtype=dtype, out=out)
    return _upcast_product(a.to(dtype), b, out)


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Compute total + a @ b, in place if there is a total, which is at least fp32; without one it is 0.

    Sums are accumulated in fp32. On devices without such products of bf16 or fp16, a @ b is rounded to that
    dtype first.
    """
    dtype = product_dtype(a.dtype, b.dtype)
    if a.dtype != b.dtype or _is_native(a.device.type, a.dtype):
        if total is None:
            return product(a, b)
        if a.dtype == b.dtype != dtype:
            return torch.addmm(total, a, b, out_dtype=dtype, out=total)
        return total.add_(product(a, b))
    if total is None:
        return (a @ b).to(dtype)
    return total.addmm_(a, b) if a.dtype == dtype else total.add_(a @ b)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute W h + bias, aligned rows [R, X] in the `product_dtype`, from rows [R, D], weight [X, D] and bias [X]."""
    dtype = product_dtype(hidden.dtype, weight.dtype)
    logits = empty_rows(len(hidden), len(weight), dtype, hidden.device)
    if bias is not None and hidden.dtype == weight.dtype == dtype:
        return torch.addmm(bias, hidden, weight.t(), out=logits)
    product(hidden, weight.t(), logits)
    return logits if bias is None else logits.add_(bias)


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
