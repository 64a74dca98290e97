"""Embedding and head rows for a new vocabulary (methods.md §2.9)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nemo_opd.transplant.row_map import RowMap

_BLOCK_CELLS = 2**23
"""Elements processed at a time in float64: 64 MiB."""


def mapped(old: Tensor, rows: RowMap, num_rows: int) -> Tensor:
    """Return R·old [num_rows, …] in the dtype of `old` [W or more, …], a matrix or a bias.

    Rows with one entry are exact copies of old rows; rows with more are summed in float64. Rows without entries, and
    padding rows beyond the new vocabulary, are the mean of the old tokens' rows.
    """
    new = old.new_empty(num_rows, *old.shape[1:])
    new[:] = _statistics(old, rows)[0].to(old.dtype)
    for begin, end in _blocks(rows, _width(old)):
        first, last = rows.starts[begin], rows.starts[end]
        counts = torch.from_numpy(np.diff(rows.starts[begin : end + 1]))
        place = torch.arange(end - begin).repeat_interleave(counts)
        weights = torch.from_numpy(rows.weights[first:last]).view(-1, *[1] * (old.dim() - 1))
        values = old[torch.from_numpy(rows.columns[first:last])].double() * weights
        sums = torch.zeros(end - begin, *old.shape[1:], dtype=torch.float64).index_add_(0, place, values)
        reached = counts > 0
        new[begin:end][reached] = sums[reached].to(old.dtype)
    # Copy instead of adding to 0, which would lose the sign of −0.
    copied = rows.copied
    new[torch.from_numpy(copied)] = old[torch.from_numpy(rows.columns[rows.starts[copied]])]
    return new


def drawn(old: Tensor, rows: RowMap, num_rows: int, seed: int) -> Tensor:
    """Draw rows [num_rows, …] from a normal with each dimension's mean and deviation over the old tokens' rows.

    The result has the dtype of `old`.
    """
    mean, deviation = _statistics(old, rows)
    generator = torch.Generator().manual_seed(seed)
    new = old.new_empty(num_rows, *old.shape[1:])
    size = max(1, _BLOCK_CELLS // _width(old))
    for begin in range(0, num_rows, size):
        block = new[begin : begin + size]
        noise = torch.randn(block.shape, generator=generator, dtype=torch.float64)
        block.copy_(mean + deviation * noise)
    return new


def _statistics(old: Tensor, rows: RowMap) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation over the old tokens' rows: float64, in the shape of a row."""
    total = torch.zeros(old.shape[1:], dtype=torch.float64)
    squares = torch.zeros_like(total)
    ids = torch.from_numpy(rows.old_tokens)
    parts = ids.split(max(1, _BLOCK_CELLS // _width(old)))
    for part in parts:
        total += old[part].double().sum(0)
    mean = total / len(ids)
    for part in parts:
        squares += (old[part].double() - mean).square().sum(0)
    return mean, (squares / len(ids)).sqrt()


def _width(old: Tensor) -> int:
    return max(1, old[0].numel())


def _blocks(rows: RowMap, width: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of one or more rows whose entries have about `_BLOCK_CELLS` elements."""
    most = max(1, _BLOCK_CELLS // width)
    begin = 0
    while begin < len(rows):
        end = max(begin + 1, int(np.searchsorted(rows.starts, rows.starts[begin] + most, "right")) - 1)
        end = min(end, begin + most, len(rows))
        yield begin, end
        begin = end
