"""Rotation of queries and keys by their positions (Su et al. 2021), each of which is read once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_opd.kernels import launch

_TILE = 2048
"""Numbers of half a head that a program takes at a time, of several heads."""


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    """Return query [B, H, S, D] and key [B, G, S, D], with the first of each head's D numbers rotated.

    They may lie in memory in any order but for the numbers of a head; what is returned lies as [B, S, H, D]. cos, sin:
    [B or 1, S, ≤ D], contiguous, of which the first half is for the first half of what is rotated. back: rotate
    gradients.
    """
    batch, _, positions, width = query.shape
    made = [torch.empty_like(each.transpose(1, 2), memory_format=torch.contiguous_format) for each in (query, key)]
    half = cos.shape[-1] // 2
    columns, rest = triton.next_power_of_2(half), width - 2 * half
    sides = [part for each, into in zip((query, key), made, strict=True) for part in _side(each, into)]
    launch.launch_layer(
        "rotary",
        (query, key, *made, cos, sin),
        lambda: _rotated[(batch * positions,)](
            *(*sides, cos, sin, 0 if len(cos) == 1 else cos.stride(0), positions, half, width, back),
            *(max(1, _TILE // columns), columns, triton.next_power_of_2(rest) if rest else 0),
        ),
    )
    return made[0].transpose(1, 2), made[1].transpose(1, 2)


def _side(given: Tensor, into: Tensor) -> tuple[Any, ...]:
    return given, given.stride(0), given.stride(1), given.stride(2), into, given.shape[1]


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    query,
    query_batch_stride,
    query_head_stride,
    query_position_stride,
    into_query,
    num_queries,
    key,
    key_batch_stride,
    key_head_stride,
    key_position_stride,
    into_key,
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
    at = batch * table_stride + position * 2 * half
    query += batch * query_batch_stride + position * query_position_stride
    into_query += place * num_queries * width
    _rotate_heads(
        query, query_head_stride, into_query, num_queries, cos + at, sin + at, half, width, BACK, HEADS, COLUMNS, REST
    )
    key += batch * key_batch_stride + position * key_position_stride
    into_key += place * num_keys * width
    _rotate_heads(key, key_head_stride, into_key, num_keys, cos + at, sin + at, half, width, BACK, HEADS, COLUMNS, REST)


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    given,
    head_stride,
    into,
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
        source, target = given + head * head_stride + column[None, :], into + head * width + column[None, :]
        first = tl.load(source, mask=inside, other=0.0)
        last = tl.load(source + half, mask=inside, other=0.0)
        if BACK:
            tl.store(target, _product(first, first_cos) + _product(last, last_sin), mask=inside)
            tl.store(target + half, _product(last, last_cos) - _product(first, first_sin), mask=inside)
        else:
            tl.store(target, _product(first, first_cos) - _product(last, first_sin), mask=inside)
            tl.store(target + half, _product(last, last_cos) + _product(first, last_sin), mask=inside)
        if REST:
            other = 2 * half + tl.arange(0, REST)[None, :]
            is_other = (head < num_heads) & (other < width)
            same = tl.load(given + head * head_stride + other, mask=is_other, other=0.0)
            tl.store(into + head * width + other, same, mask=is_other)


@triton.jit
def _product(x, factor):  # type: ignore[no-untyped-def]
    """Multiply, and round as PyTorch does before it adds two products."""
    return (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype).to(tl.float32)
