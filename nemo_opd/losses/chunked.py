"""Losses over large rows without keeping them: the gradient is formed inside forward (METHODS §8)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from nemo_opd.errors import ConfigError

CHUNK_BYTES = 256 * 2**20
"""Budget for the temporaries of one chunk: enough rows to fill a GPU."""
CPU_CHUNK_BYTES = 64 * 2**20
"""The same on a CPU, where a chunk should stay near its cache."""

ChunkLoss = Callable[[Tensor, slice], Tensor]
"""(source rows [R, X] in fp32, which of `rows` they are) → the summed loss of those rows, a scalar."""


def chunked_sum(source: Tensor, rows: Tensor, loss_of: ChunkLoss, *, width: int, parts: Sequence[slice]) -> Tensor:
    """Σ loss_of(rows[part]) over parts, as a scalar with a gradient for `source` only (METHODS §8).

    source [..., X] in any float type, of which a loss sees the leading `width` columns; rows: distinct indices [R] into
    the flattened leading dims; parts: consecutive slices of `rows`, cut nowhere inside a unit. Whatever else the loss
    reads (teacher logits, targets) it closes over and slices itself, and gets no gradient.

    The only tensor saved for backward is the gradient, of the type and shape of `source`. Without a gradient to form
    (validation) not even that is made. No rows give a zero that is still connected to `source`.
    """
    if torch.is_grad_enabled() and source.requires_grad:
        return _ChunkedSum.apply(source, rows, loss_of, width, parts)
    with torch.no_grad():
        total = source.new_zeros((), dtype=compute_dtype(source))
        for part, chunk in _chunks(source, rows, width, parts):
            total += loss_of(chunk, part)
    return total


def compute_dtype(source: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64 input."""
    return torch.promote_types(source.dtype, torch.float32)


def equal_parts(rows: Tensor, cells_per_row: int, chunk_size: int | None) -> list[slice]:
    """Slices of `chunk_size` rows, for losses whose unit is one row.

    By default as many rows as fit a byte budget when a row takes `cells_per_row` fp32 numbers at the peak of a chunk.
    """
    budget = CPU_CHUNK_BYTES if rows.device.type == "cpu" else CHUNK_BYTES
    size = max(1, budget // (4 * cells_per_row)) if chunk_size is None else chunk_size
    if size < 1:
        raise ConfigError(
            f"chunk_size={size}: a chunk has at least 1 row; give a larger number, or none for the default"
        )
    return [slice(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: Tensor, rows: Tensor, loss_of: ChunkLoss, width: int, parts: Sequence[slice]
    ) -> Tensor:
        total = source.new_zeros((), dtype=compute_dtype(source))
        gradient = torch.zeros(source.shape, dtype=source.dtype, device=source.device)
        used_columns = gradient.flatten(0, -2).narrow(1, 0, width)
        for part, chunk in _chunks(source.detach(), rows, width, parts):
            chunk_total, chunk_gradient = _value_and_gradient(loss_of, chunk, part)
            total += chunk_total
            used_columns.index_copy_(0, rows[part], chunk_gradient.to(gradient.dtype))
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_output, None, None, None, None


def _chunks(source: Tensor, rows: Tensor, width: int, parts: Sequence[slice]) -> Iterator[tuple[slice, Tensor]]:
    columns = source.flatten(0, -2).narrow(1, 0, width)
    for part in parts:
        yield part, columns.index_select(0, rows[part]).to(compute_dtype(source))


def _value_and_gradient(loss_of: ChunkLoss, chunk: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """A caller's saved-tensor hooks (offloading, accounting) are for what outlives forward; they do not see a chunk."""
    with torch.enable_grad(), saved_tensors_hooks(_same, _same):
        leaf = chunk.requires_grad_()
        value = loss_of(leaf, part)
        (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def _same(tensor: Tensor) -> Tensor:
    return tensor
