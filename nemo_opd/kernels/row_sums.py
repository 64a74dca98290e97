"""Sums of exponentials along rows of logits, which read each row once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_opd.kernels import launch
from nemo_opd.kernels.arithmetic import LOWEST, add_to_sum, log_of_sum


def row_sums(
    rows: Tensor, num_columns: int, temperature: float, weights: Tensor | None, is_needed: Tensor | None, num_rows: int
) -> Tensor:
    """Return fp32 [R, 4] for logits/τ x [R, ≥ X]: peak and log Σ exp(x − peak), and both weighted by `weights` [X].

    is_needed: int32 [R], below 0 for rows to skip. num_rows: number of rows that are not skipped.
    """
    sums = torch.empty(len(rows), 4, dtype=torch.float32, device=rows.device)
    num_bytes = num_rows * num_columns * rows.element_size() + (0 if weights is None else 4 * num_columns)
    launch.launch(
        "row_sums",
        num_bytes + 16 * num_rows,
        lambda: _row_sums[(len(rows),)](
            rows,
            rows.stride(0),
            num_columns,
            launch.readable(num_columns, rows, *(() if weights is None else (weights,))),
            1 / temperature,
            rows if weights is None else weights,
            sums if is_needed is None else is_needed,
            sums,
            weights is not None,
            is_needed is not None,
            launch.BLOCK,
            num_warps=launch.WARPS,
        ),
    )
    return sums


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    rows,
    stride,
    num_columns,
    end,
    over_temperature,
    weights,
    is_needed,
    sums,
    HAS_WEIGHTS: tl.constexpr,
    HAS_NEEDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if HAS_NEEDED:
        if tl.load(is_needed + row) < 0:
            return
    peak, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    weighted_peak, weighted_total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(rows + row * stride + columns, mask=columns < end, other=0.0).to(tl.float32)
        x = tl.where(columns < num_columns, x, -float("inf")) * over_temperature
        peak, total = add_to_sum(peak, total, x, tl.full([BLOCK], 1.0, tl.float32))
        if HAS_WEIGHTS:
            weight = tl.load(weights + columns, mask=columns < end, other=0.0)
            weight = tl.where(columns < num_columns, weight, 0.0)
            weighted_peak, weighted_total = add_to_sum(weighted_peak, weighted_total, x, weight)
    highest, log_sum = log_of_sum(peak, total)
    tl.store(sums + row * 4, highest)
    tl.store(sums + row * 4 + 1, log_sum)
    if HAS_WEIGHTS:
        highest, log_sum = log_of_sum(weighted_peak, weighted_total)
        tl.store(sums + row * 4 + 2, highest)
        tl.store(sums + row * 4 + 3, log_sum)
