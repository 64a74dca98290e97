"""One pass over rows of logits that forms the losses of their units, or the sum of their gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from nemo_opd.kernels.arithmetic import compare


@triton.jit
def _log_p(x, sums, row):  # type: ignore[no-untyped-def]
    """Compute log p of logits/τ. sums, row: where the peak of its row is."""
    return (x - tl.load(sums + row)) - tl.load(sums + row + 1)


@triton.jit
def of_rows(  # type: ignore[no-untyped-def]
    student,
    stride,
    total,
    total_stride,
    num_columns,
    # Surprise
    units_a,
    targets,
    factors_a,
    sums_a,
    losses_a,
    columns_a,
    # Comparison
    units_b,
    teacher_b,
    stride_b,
    factors_b,
    sums_b,
    teacher_sums_b,
    losses_b,
    leans_b,
    columns_b,
    over_b,
    weight_b,
    # CellComparison
    units_c,
    teacher_c,
    stride_c,
    factors_c,
    sums_c,
    teacher_sums_c,
    losses_c,
    leans_c,
    columns_c,
    over_c,
    weight_c,
    coverage,
    partner,
    begins,
    cells,
    weights,
    ratios,
    num_cells,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    HAS_C: tl.constexpr,
    KIND_B: tl.constexpr,
    KIND_C: tl.constexpr,
    HAS_CELLS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    IS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute losses of a row. units_*[row]: its unit of that form, below 0 where it has none.

    Without gradients: put the divergences of b and c, and the sums (leans) of their gradients by log s. With them: put
    Σ factor · gradient into `total`, or add it; and the surprises, and the divergences whose leans are known to be 0.
    """
    row = tl.program_id(0).to(tl.int64)
    a, b, c = tl.full([], -1, tl.int64), tl.full([], -1, tl.int64), tl.full([], -1, tl.int64)
    if HAS_A:
        a = tl.load(units_a + row).to(tl.int64)
    if HAS_B:
        b = tl.load(units_b + row).to(tl.int64)
    if HAS_C:
        c = tl.load(units_c + row).to(tl.int64)
    if (a < 0) & (b < 0) & (c < 0):
        return
    nothing = -float("inf")
    value_b, lean_b = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    value_c, lean_c = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(student + row * stride + column, mask=column < num_columns, other=nothing).to(tl.float32)
        gradient = tl.zeros([BLOCK], tl.float32)
        if HAS_A:
            if a >= 0:
                p = tl.exp(_log_p(tl.where(column < columns_a, z, nothing), sums_a, row * 4))
                gradient += tl.load(factors_a + a) * (p - tl.where(column == tl.load(targets + a), 1.0, 0.0))
        if HAS_B:
            if b >= 0:
                inside = column < columns_b
                x = tl.where(inside, z, nothing) * over_b
                y = tl.load(teacher_b + b * stride_b + column, mask=inside, other=nothing).to(tl.float32) * over_b
                shift = (tl.load(teacher_sums_b + b * 4) - tl.load(sums_b + row * 4)) + (
                    tl.load(teacher_sums_b + b * 4 + 1) - tl.load(sums_b + row * 4 + 1)
                )
                s, t = tl.exp(_log_p(x, sums_b, row * 4)), tl.exp(_log_p(y, teacher_sums_b, b * 4))
                value, slope = compare(t, s, (y - x) - shift, KIND_B, weight_b)
                if HAS_GRADIENT:
                    if KIND_B != 0:
                        slope -= s * tl.load(leans_b + b)
                    gradient += tl.load(factors_b + b) * slope
                else:
                    lean_b += slope
                value_b += value
        if HAS_C:
            if c >= 0:
                inside = column < columns_c
                x = tl.where(inside, z, nothing) * over_c
                lean = 0.0
                if HAS_GRADIENT and KIND_C != 0:
                    lean = tl.load(leans_c + c)
                shift = (tl.load(teacher_sums_c + c * 4 + 2) - tl.load(sums_c + row * 4 + 2)) + (
                    tl.load(teacher_sums_c + c * 4 + 3) - tl.load(sums_c + row * 4 + 3)
                )
                log_s = _log_p(x, sums_c + 2, row * 4)
                other = tl.load(partner + column, mask=inside, other=-1)
                is_pair = other >= 0
                y = tl.load(teacher_c + c * stride_c + other, mask=is_pair, other=nothing).to(tl.float32) * over_c
                s = tl.where(is_pair, tl.exp(log_s), 0.0)
                t = tl.exp(_log_p(y, teacher_sums_c + 2, c * 4))
                value, slope = compare(t, s, (y - x) - shift, KIND_C, weight_c)
                own = slope - s * (lean + coverage)
                value, slope = tl.where(is_pair, value, 0.0), tl.where(is_pair, slope, 0.0)
                own = tl.where(is_pair, own, 0.0)
                if HAS_CELLS:
                    begin = tl.load(begins + column, mask=inside, other=0)
                    end = tl.load(begins + column + 1, mask=inside, other=0)
                    for j in range(tl.max(end - begin, 0)):
                        listed = begin + j < end
                        cell = tl.load(cells + begin + j, mask=listed, other=0)
                        weight = tl.load(weights + begin + j, mask=listed, other=0.0)
                        ratio = tl.load(ratios + c * num_cells + cell, mask=listed, other=0.0)
                        # The part of its cell that is the token's, on either side.
                        s = tl.where(listed, tl.exp(log_s), 0.0)
                        t = tl.where(listed & (log_s > nothing), tl.exp(log_s + ratio), 0.0)
                        of_cell, by_cell = compare(t, s, ratio, KIND_C, weight_c)
                        value += weight * of_cell
                        slope += weight * by_cell
                        own += weight * (by_cell - s * (lean + coverage))
                if HAS_GRADIENT:
                    own += coverage * tl.exp(_log_p(x, sums_c, row * 4))
                    gradient += tl.load(factors_c + c) * own
                else:
                    lean_c += slope
                value_c += value
        if HAS_GRADIENT:
            inside = column < num_columns
            place = total + row * total_stride + column
            if not IS_FIRST:
                gradient += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            tl.store(place, gradient, mask=inside)
    if HAS_A and HAS_GRADIENT:
        if a >= 0:
            target = tl.load(student + row * stride + tl.load(targets + a)).to(tl.float32)
            tl.store(losses_a + a, -_log_p(target, sums_a, row * 4))
    if HAS_B and (not HAS_GRADIENT or KIND_B == 0):
        if b >= 0:
            tl.store(losses_b + b, tl.sum(value_b, 0))
            tl.store(leans_b + b, tl.sum(lean_b, 0))
    if HAS_C and (not HAS_GRADIENT or KIND_C == 0):
        if c >= 0:
            tl.store(losses_c + c, tl.sum(value_c, 0))
            tl.store(leans_c + c, tl.sum(lean_c, 0))
