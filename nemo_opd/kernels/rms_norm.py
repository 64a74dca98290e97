"""Root mean square normalisation of rows (Zhang and Sennrich 2019), which are read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_opd.kernels import launch

_TILE = 4096
"""Numbers that a program takes at a time, where rows are not longer."""
_PROGRAMS = 2
"""Programs of the gradient that a multiprocessor holds at once: each thread has up to 114 registers."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the rows [R, D], rounded before they are multiplied by `weight` [D], and 1/RMS of each, fp32 [R]."""
    num_rows, num_columns = x.shape
    found, inverse = torch.empty_like(x), torch.empty(num_rows, dtype=torch.float32, device=x.device)
    rows, columns = _tile(num_columns)
    launch.launch_layer(
        "rms_norm",
        (x, weight, found, inverse),
        lambda: _forward[(triton.cdiv(num_rows, rows),)](
            *(x, weight, found, inverse, num_rows, num_columns, eps, rows, columns), num_warps=launch.WARPS
        ),
    )
    return found, inverse


def rms_norm_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, *, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the rows [R, D] and, if asked for, of the weight [D]."""
    num_rows, num_columns = x.shape
    found, (rows, columns) = torch.empty_like(x), _tile(num_columns)
    programs = triton.cdiv(num_rows, rows)
    if of_weight:  # each program adds up a part
        programs = min(programs, _PROGRAMS * launch.num_multiprocessors(x.device))
    parts = torch.empty(programs if of_weight else 0, num_columns, dtype=torch.float32, device=x.device)
    launch.launch_layer(
        "gradient of rms_norm",
        (gradient, x, weight, inverse, found, parts),
        lambda: _backward[(programs,)](
            *(gradient, x, weight, inverse, found, parts, num_rows, num_columns, of_weight, rows, columns),
            num_warps=launch.WARPS,
        ),
    )
    return found, parts.sum(0).to(weight.dtype) if of_weight else None


def _tile(num_columns: int) -> tuple[int, int]:
    """Return how many rows, and columns of each, a program takes at a time."""
    columns = triton.next_power_of_2(num_columns)
    return max(1, _TILE // columns), columns


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, weight, found, inverse, num_rows, num_columns, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    place = row[:, None] * num_columns + column[None, :]
    given = tl.load(x + place, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / num_columns + eps)
    rounded = (wide * scale[:, None]).to(given.dtype).to(tl.float32)
    factor = tl.load(weight + column, mask=column < num_columns, other=0.0).to(tl.float32)
    tl.store(found + place, rounded * factor[None, :], mask=inside)
    tl.store(inverse + row, scale, mask=row < num_rows)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    gradient,
    x,
    weight,
    inverse,
    found,
    parts,
    num_rows,
    num_columns,
    OF_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    factor = tl.load(weight + column, mask=column < num_columns, other=0.0).to(tl.float32)
    of_weight = tl.zeros([COLUMNS], tl.float32)
    for start in range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        place = row[:, None] * num_columns + column[None, :]
        given = tl.load(x + place, mask=inside, other=0.0)
        scale = tl.load(inverse + row, mask=row < num_rows, other=0.0)[:, None]
        after = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        normalized = given.to(tl.float32) * scale
        before = after * factor[None, :]
        mean = tl.sum(before * normalized, 1) / num_columns
        tl.store(found + place, (before - normalized * mean[:, None]) * scale, mask=inside)
        if OF_WEIGHT:
            of_weight += tl.sum(after * normalized.to(given.dtype).to(tl.float32), 0)
    if OF_WEIGHT:
        tl.store(parts + program * num_columns + column, of_weight, mask=column < num_columns)
