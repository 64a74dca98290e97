"""Kernels of decoder layers that read each input once: RMSNorm, rotary embeddings and SwiGLU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_opd.kernels import launch

_NORM_TILE = 4096
"""Numbers that a program processes at a time, or one row if it is longer."""
_PROGRAMS = 2
"""Programs of the gradient that fit a multiprocessor, with up to 114 registers per thread."""
_ROTARY_TILE = 2048
"""Numbers in half heads that a program processes at a time, of several heads."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised rows [R, D], rounded before multiplication by `weight` [D], and their 1/RMS, fp32 [R]."""
    num_rows, num_columns = x.shape
    output, inverse = torch.empty_like(x), torch.empty(num_rows, dtype=torch.float32, device=x.device)
    rows, columns = _tile(num_columns)
    launch.launch_layer(
        "rms_norm",
        (x, weight, output, inverse),
        lambda: _rms_norm_forward[(triton.cdiv(num_rows, rows),)](
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
        lambda: _rms_norm_backward[(programs,)](
            *(gradient, x, weight, inverse, x_gradient, parts, num_rows, num_columns, needs_weight, rows, columns),
            num_warps=launch.WARPS,
        ),
    )
    return x_gradient, parts.sum(0).to(weight.dtype) if needs_weight else None


def _tile(num_columns: int) -> tuple[int, int]:
    """Return the number of rows, and of columns as a power of 2, that a program processes at a time."""
    columns = triton.next_power_of_2(num_columns)
    return max(1, _NORM_TILE // columns), columns


@triton.jit
def _rms_norm_forward(  # type: ignore[no-untyped-def]
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
def _rms_norm_backward(  # type: ignore[no-untyped-def]
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


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    """Return query [B, H, S, D] and key [B, G, S, D], with the first numbers of each head rotated, as many as cos has.

    The inputs may have any strides except within a head; the results are contiguous as [B, S, H, D]. cos, sin:
    [B or 1, S, ≤ D], contiguous, the first half for the first half of the rotated numbers. back: rotate gradients, that
    is, in the opposite direction.
    """
    batch, _, positions, width = query.shape
    outputs = [torch.empty_like(side.transpose(1, 2), memory_format=torch.contiguous_format) for side in (query, key)]
    half = cos.shape[-1] // 2
    columns, num_unrotated = triton.next_power_of_2(half), width - 2 * half
    arguments = *_side_arguments(query, outputs[0]), *_side_arguments(key, outputs[1])
    launch.launch_layer(
        "rotary",
        (query, key, *outputs, cos, sin),
        lambda: _rotate_both[(batch * positions,)](
            *(*arguments, cos, sin, 0 if len(cos) == 1 else cos.stride(0), positions, half, width, back),
            *(max(1, _ROTARY_TILE // columns), columns, triton.next_power_of_2(num_unrotated) if num_unrotated else 0),
        ),
    )
    return outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)


def _side_arguments(side: Tensor, output: Tensor) -> tuple[Any, ...]:
    return side, side.stride(0), side.stride(1), side.stride(2), output, side.shape[1]


@triton.jit
def _rotate_both(  # type: ignore[no-untyped-def]
    query,
    query_batch_stride,
    query_head_stride,
    query_position_stride,
    query_output,
    num_queries,
    key,
    key_batch_stride,
    key_head_stride,
    key_position_stride,
    key_output,
    num_keys,
    cos,
    sin,
    table_stride,
    num_positions,
    half,
    width,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    batch, position = place // num_positions, place % num_positions
    offset = batch * table_stride + position * 2 * half
    cos += offset
    sin += offset
    query += batch * query_batch_stride + position * query_position_stride
    query_output += place * num_queries * width
    _rotate_heads(
        query, query_head_stride, query_output, num_queries, cos, sin, half, width, BACK, HEADS, COLUMNS, REST
    )
    key += batch * key_batch_stride + position * key_position_stride
    key_output += place * num_keys * width
    _rotate_heads(key, key_head_stride, key_output, num_keys, cos, sin, half, width, BACK, HEADS, COLUMNS, REST)


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    heads,
    head_stride,
    output,
    num_heads,
    cos,
    sin,
    half,
    width,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    is_column = column < half
    first_cos = tl.load(cos + column, mask=is_column, other=0.0)[None, :]
    last_cos = tl.load(cos + half + column, mask=is_column, other=0.0)[None, :]
    first_sin = tl.load(sin + column, mask=is_column, other=0.0)[None, :]
    last_sin = tl.load(sin + half + column, mask=is_column, other=0.0)[None, :]
    for start in range(0, num_heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        inside = (head < num_heads) & is_column[None, :]
        source, target = heads + head * head_stride + column[None, :], output + head * width + column[None, :]
        first = tl.load(source, mask=inside, other=0.0)
        last = tl.load(source + half, mask=inside, other=0.0)
        if BACK:
            tl.store(target, _product(first, first_cos) + _product(last, last_sin), mask=inside)
            tl.store(target + half, _product(last, last_cos) - _product(first, first_sin), mask=inside)
        else:
            tl.store(target, _product(first, first_cos) - _product(last, first_sin), mask=inside)
            tl.store(target + half, _product(last, last_cos) + _product(first, last_sin), mask=inside)
        if REST:
            unrotated = 2 * half + tl.arange(0, REST)[None, :]
            is_unrotated = (head < num_heads) & (unrotated < width)
            same = tl.load(heads + head * head_stride + unrotated, mask=is_unrotated, other=0.0)
            tl.store(output + head * width + unrotated, same, mask=is_unrotated)


@triton.jit
def _product(x, factor):  # type: ignore[no-untyped-def]
    """Multiply and round, as PyTorch does before it adds two products."""
    return (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype).to(tl.float32)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate), rounded, times `up`. gate, up: [R, F] with any row stride."""
    num_rows, num_columns = gate.shape
    output = torch.empty(num_rows, num_columns, dtype=gate.dtype, device=gate.device)
    launch.launch_layer(
        "swiglu",
        (gate, up, output),
        lambda: _swiglu_forward[(num_rows, triton.cdiv(num_columns, launch.BLOCK))](
            *(gate, gate.stride(0), up, up.stride(0), output, num_columns, launch.BLOCK)
        ),
    )
    return output


def swiglu_gradient(gradient: Tensor, gate: Tensor, up: Tensor, gate_gradient: Tensor, up_gradient: Tensor) -> None:
    """Write the gradients of `gate` and `up` to `gate_gradient` and `up_gradient`.

    All tensors are [R, F] with any row stride.
    """
    num_rows, num_columns = gate.shape
    tensors = (gradient, gate, up, gate_gradient, up_gradient)
    arguments = [argument for tensor in tensors for argument in (tensor, tensor.stride(0))]
    launch.launch_layer(
        "gradient of swiglu",
        tensors,
        lambda: _swiglu_backward[(num_rows, triton.cdiv(num_columns, launch.BLOCK))](
            *arguments, num_columns, launch.BLOCK
        ),
    )


@triton.jit
def _swiglu_forward(  # type: ignore[no-untyped-def]
    gate, gate_stride, up, up_stride, output, num_columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    value = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(value.dtype).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * num_columns + column, activated * factor, mask=inside)


@triton.jit
def _swiglu_backward(  # type: ignore[no-untyped-def]
    gradient,
    gradient_stride,
    gate,
    gate_stride,
    up,
    up_stride,
    gate_gradient,
    gate_gradient_stride,
    up_gradient,
    up_gradient_stride,
    num_columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    output_gradient = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    wide = value.to(tl.float32)
    sigmoid = tl.sigmoid(wide)
    activated = wide * sigmoid
    slope = sigmoid + activated * (1 - sigmoid)
    tl.store(gate_gradient + row * gate_gradient_stride + column, output_gradient * factor * slope, mask=inside)
    rounded = activated.to(value.dtype).to(tl.float32)
    tl.store(up_gradient + row * up_gradient_stride + column, output_gradient * rounded, mask=inside)
