"""Rotary position embeddings of queries and keys (Su et al. 2021), which read each once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_opd.kernels import launch

_TILE = 2048
"""Numbers in half heads that a program processes at a time, of several heads."""


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
        lambda: _rotated[(batch * positions,)](
            *(*arguments, cos, sin, 0 if len(cos) == 1 else cos.stride(0), positions, half, width, back),
            *(max(1, _TILE // columns), columns, triton.next_power_of_2(num_unrotated) if num_unrotated else 0),
        ),
    )
    return outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)


def _side_arguments(side: Tensor, output: Tensor) -> tuple[Any, ...]:
    return side, side.stride(0), side.stride(1), side.stride(2), output, side.shape[1]


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
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
