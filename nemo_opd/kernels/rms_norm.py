"""Root mean square normalisation of rows (Zhang and Sennrich 2019), which reads each row once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_opd.kernels import launch

_TILE = 4096
"""Numbers that a program processes at a time, or one row if it is longer."""
_PROGRAMS = 2
"""Programs of the gradient that fit a multiprocessor, with up to 114 registers per thread."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised rows [R, D], rounded before multiplication by `weight` [D], and their 1/RMS, fp32 [R]."""
    num_rows, num_columns = x.shape
    output, inverse = torch.empty_like(x), torch.empty(num_rows, dtype=torch.float32, device=x.device)
    rows, columns = _tile(num_columns)
    launch.launch_layer(
        "rms_norm",
        (x, weight, output, inverse),
        lambda: _forward[(triton.cdiv(num_rows, rows),)](
            *(x, weight, output, inverse, num_rows, num_columns, eps, rows, columns), num_warps=launch.WARPS
        ),
    )
    return output, inverse


def rms_norm_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, *, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the rows [R, D] and, with `needs_weight`, of the weight [D]."""
    num_rows, num_columns = x.shape
    x_gradient, (rows, columns) = torch.empty_like(x), _tile(num_columns)
    programs = triton.cdiv(num_rows, rows)
    if needs_weight:  # each program writes a partial sum
        programs = min(programs, _PROGRAMS * launch.num_multiprocessors(x.device))
    parts = torch.empty(programs if needs_weight else 0, num_columns, dtype=torch.float32, device=x.device)
    launch.launch_layer(
        "gradient of rms_norm",
        (gradient, x, weight, inverse, x_gradient, parts),
        lambda: _backward[(programs,)](
            *(gradient, x, weight, inverse, x_gradient, parts, num_rows, num_columns, needs_weight, rows, columns),
            num_warps=launch.WARPS,
        ),
    )
    return x_gradient, parts.sum(0).to(weight.dtype) if needs_weight else None


def _tile(num_columns: int) -> tuple[int, int]:
    """Return the number of rows, and of columns as a power of 2, that a program processes at a time."""
    columns = triton.next_power_of_2(num_columns)
    return max(1, _TILE // columns), columns


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, weight, output, inverse, num_rows, num_columns, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    place = row[:, None] * num_columns + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / num_columns + eps)
    rounded = (wide * scale[:, None]).to(value.dtype).to(tl.float32)
    factor = tl.load(weight + column, mask=column < num_columns, other=0.0).to(tl.float32)
    tl.store(output + place, rounded * factor[None, :], mask=inside)
    tl.store(inverse + row, scale, mask=row < num_rows)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    gradient,
    x,
    weight,
    inverse,
    x_gradient,
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
    weight_gradient = tl.zeros([COLUMNS], tl.float32)
    for start in range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        place = row[:, None] * num_columns + column[None, :]
        value = tl.load(x + place, mask=inside, other=0.0)
        scale = tl.load(inverse + row, mask=row < num_rows, other=0.0)[:, None]
        output_gradient = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        normalized = value.to(tl.float32) * scale
        weighted = output_gradient * factor[None, :]
        mean = tl.sum(weighted * normalized, 1) / num_columns
        tl.store(x_gradient + place, (weighted - normalized * mean[:, None]) * scale, mask=inside)
        if OF_WEIGHT:
            weight_gradient += tl.sum(output_gradient * normalized.to(value.dtype).to(tl.float32), 0)
    if OF_WEIGHT:
        tl.store(parts + program * num_columns + column, weight_gradient, mask=column < num_columns)
