"""Products of bf16 or fp16 matrices whose sums are not rounded to bf16 or fp16 (methods.md §8.3).

Between a student and a teacher that nearly agree, the logits differ by less than bf16 can tell: at 16 to 32 its numbers
lie 0.125 apart, which alone makes a KL of up to 0.125²/12 nats a token. The sums are formed in fp32 in any case; what
costs the digits is how they are written.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from nemo_opd.logits.aligned import empty_rows

_UPCAST_BYTES = 2 * 2**20
"""Bytes of the head that are cast to fp32 at a time on devices without such a product: they fit a cache, so that
128 rows take as long as in fp32; with 4 MiB they take a third longer.
"""


def product_dtype(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    """Return the dtype of `product`: the promoted dtype of the operands, fp32 at least."""
    return torch.promote_types(torch.promote_types(left, right), torch.float32)


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute left @ right, [R, D] and [D, X] → [R, X] in the `product_dtype`, without a graph.

    Exact but for the rounding of fp32 sums: a product of two bf16 or two fp16 numbers is an fp32 number. Operands of
    different dtypes are taken as they are. out: rows for the result, at any distance from each other.
    """
    dtype = product_dtype(left.dtype, right.dtype)
    if left.dtype == right.dtype == dtype:
        return torch.mm(left, right, out=out)
    if left.dtype == right.dtype and _is_native(left.device.type, left.dtype):
        return torch.mm(left, right, out_dtype=dtype, out=out)
    return _upcast_product(left.to(dtype), right, out)


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Compute total + left @ right, in place; total: fp32 at least, None: 0.

    Sums are formed in fp32. Where a device has no such product of bf16 or fp16, each product is rounded to these first.
    """
    dtype = product_dtype(left.dtype, right.dtype)
    if left.dtype != right.dtype or _is_native(left.device.type, left.dtype):
        if total is None:
            return product(left, right)
        if left.dtype == right.dtype != dtype:
            return torch.addmm(total, left, right, out_dtype=dtype, out=total)
        return total.add_(product(left, right))
    if total is None:
        return (left @ right).to(dtype)
    return total.addmm_(left, right) if left.dtype == dtype else total.add_(left @ right)


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
    """Try whether a device has products with fp32 output: not every build of PyTorch for GPUs does."""
    one = torch.ones(1, 1, dtype=dtype, device=device)
    try:
        total = torch.mm(one, one, out_dtype=torch.float32, out=torch.empty(1, 1, device=device))
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _upcast_product(left: Tensor, right: Tensor, out: Tensor | None) -> Tensor:
    """Compute the product from a few columns at a time, upcast to the dtype of `left`."""
    made = left.new_empty(len(left), right.shape[1]) if out is None else out
    step = max(1, _UPCAST_BYTES // (left.dtype.itemsize * max(1, len(right))))
    for start in range(0, right.shape[1], step):
        columns = slice(start, start + step)
        torch.mm(left, right[:, columns].to(left.dtype), out=made[:, columns])
    return made
