"""Sums of exponentials along rows of logits, each of which is read once."""

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
    """Return fp32 [R, 4] of logits [R, ≥ X]: peak and log Σ exp(x − peak), the same weighted by `weights` [X].

    is_needed: int32 [R], below 0 for rows that are left out; num_rows: how many are not.
    """
    found = torch.empty(len(rows), 4, dtype=torch.float32, device=rows.device)
    given = rows if weights is None else weights
    needed = found if is_needed is None else is_needed
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
            given,
            needed,
            found,
            weights is not None,
            is_needed is not None,
            launch.BLOCK,
            num_warps=launch.WARPS,
        ),
    )
    return found


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    rows,
    stride,
    num_columns,
    end,
    over_temperature,
    weights,
    is_needed,
    found,
    HAS_WEIGHTS: tl.constexpr,
    HAS_NEEDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if HAS_NEEDED:
        if tl.load(is_needed + row) < 0:
            return
    peak, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    own_peak, own_total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(rows + row * stride + columns, mask=columns < end, other=0.0).to(tl.float32)
        x = tl.where(columns < num_columns, x, -float("inf")) * over_temperature
        peak, total = add_to_sum(peak, total, x, tl.full([BLOCK], 1.0, tl.float32))
        if HAS_WEIGHTS:
            weight = tl.load(weights + columns, mask=columns < end, other=0.0)
            weight = tl.where(columns < num_columns, weight, 0.0)
            own_peak, own_total = add_to_sum(own_peak, own_total, x, weight)
    highest, log_sum = log_of_sum(peak, total)
    tl.store(found + row * 4, highest)
    tl.store(found + row * 4 + 1, log_sum)
    if HAS_WEIGHTS:
        highest, log_sum = log_of_sum(own_peak, own_total)
        tl.store(found + row * 4 + 2, highest)
        tl.store(found + row * 4 + 3, log_sum)
