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
    surprise_units,
    targets,
    surprise_factors,
    surprise_sums,
    surprise_losses,
    surprise_columns,
    # Comparison
    comparison_units,
    comparison_teacher,
    comparison_stride,
    comparison_factors,
    comparison_sums,
    comparison_teacher_sums,
    comparison_losses,
    comparison_leans,
    comparison_columns,
    comparison_over_temperature,
    comparison_weight,
    # CellComparison
    mapped_units,
    mapped_teacher,
    mapped_stride,
    mapped_factors,
    mapped_sums,
    mapped_teacher_sums,
    mapped_losses,
    mapped_leans,
    mapped_columns,
    mapped_over_temperature,
    mapped_weight,
    coverage,
    partner,
    begins,
    cells,
    weights,
    ratios,
    num_cells,
    HAS_SURPRISE: tl.constexpr,
    HAS_COMPARISON: tl.constexpr,
    HAS_MAPPED: tl.constexpr,
    COMPARISON_KIND: tl.constexpr,
    MAPPED_KIND: tl.constexpr,
    HAS_CELLS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    IS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute losses of a row. *_units[row]: its unit of that form, below 0 where it has none.

    Without gradients: put the divergences of Comparison and CellComparison (mapped), and the sums (leans) of their
    gradients by log s. With them: put Σ factor · gradient into `total`, or add it; and the surprises, and the
    divergences whose leans are known to be 0.
    """
    row = tl.program_id(0).to(tl.int64)
    surprise, comparison, mapped = tl.full([], -1, tl.int64), tl.full([], -1, tl.int64), tl.full([], -1, tl.int64)
    if HAS_SURPRISE:
        surprise = tl.load(surprise_units + row).to(tl.int64)
    if HAS_COMPARISON:
        comparison = tl.load(comparison_units + row).to(tl.int64)
    if HAS_MAPPED:
        mapped = tl.load(mapped_units + row).to(tl.int64)
    if (surprise < 0) & (comparison < 0) & (mapped < 0):
        return
    nothing = -float("inf")
    comparison_value, comparison_lean = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    mapped_value, mapped_lean = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(student + row * stride + column, mask=column < num_columns, other=nothing).to(tl.float32)
        gradient = tl.zeros([BLOCK], tl.float32)
        if HAS_SURPRISE:
            if surprise >= 0:
                p = tl.exp(_log_p(tl.where(column < surprise_columns, z, nothing), surprise_sums, row * 4))
                is_target = tl.where(column == tl.load(targets + surprise), 1.0, 0.0)
                gradient += tl.load(surprise_factors + surprise) * (p - is_target)
        if HAS_COMPARISON:
            if comparison >= 0:
                inside = column < comparison_columns
                x = tl.where(inside, z, nothing) * comparison_over_temperature
                place = comparison_teacher + comparison * comparison_stride + column
                y = tl.load(place, mask=inside, other=nothing).to(tl.float32) * comparison_over_temperature
                shift = (tl.load(comparison_teacher_sums + comparison * 4) - tl.load(comparison_sums + row * 4)) + (
                    tl.load(comparison_teacher_sums + comparison * 4 + 1) - tl.load(comparison_sums + row * 4 + 1)
                )
                s = tl.exp(_log_p(x, comparison_sums, row * 4))
                t = tl.exp(_log_p(y, comparison_teacher_sums, comparison * 4))
                value, slope = compare(t, s, (y - x) - shift, COMPARISON_KIND, comparison_weight)
                if HAS_GRADIENT:
                    if COMPARISON_KIND != 0:
                        slope -= s * tl.load(comparison_leans + comparison)
                    gradient += tl.load(comparison_factors + comparison) * slope
                else:
                    comparison_lean += slope
                comparison_value += value
        if HAS_MAPPED:
            if mapped >= 0:
                inside = column < mapped_columns
                x = tl.where(inside, z, nothing) * mapped_over_temperature
                lean = 0.0
                if HAS_GRADIENT and MAPPED_KIND != 0:
                    lean = tl.load(mapped_leans + mapped)
                shift = (tl.load(mapped_teacher_sums + mapped * 4 + 2) - tl.load(mapped_sums + row * 4 + 2)) + (
                    tl.load(mapped_teacher_sums + mapped * 4 + 3) - tl.load(mapped_sums + row * 4 + 3)
                )
                log_s = _log_p(x, mapped_sums + 2, row * 4)
                other = tl.load(partner + column, mask=inside, other=-1)
                is_pair = other >= 0
                place = mapped_teacher + mapped * mapped_stride + other
                y = tl.load(place, mask=is_pair, other=nothing).to(tl.float32) * mapped_over_temperature
                s = tl.where(is_pair, tl.exp(log_s), 0.0)
                t = tl.exp(_log_p(y, mapped_teacher_sums + 2, mapped * 4))
                value, slope = compare(t, s, (y - x) - shift, MAPPED_KIND, mapped_weight)
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
                        ratio = tl.load(ratios + mapped * num_cells + cell, mask=listed, other=0.0)
                        # The part of its cell that is the token's, on either side.
                        s = tl.where(listed, tl.exp(log_s), 0.0)
                        t = tl.where(listed & (log_s > nothing), tl.exp(log_s + ratio), 0.0)
                        of_cell, by_cell = compare(t, s, ratio, MAPPED_KIND, mapped_weight)
                        value += weight * of_cell
                        slope += weight * by_cell
                        own += weight * (by_cell - s * (lean + coverage))
                if HAS_GRADIENT:
                    own += coverage * tl.exp(_log_p(x, mapped_sums, row * 4))
                    gradient += tl.load(mapped_factors + mapped) * own
                else:
                    mapped_lean += slope
                mapped_value += value
        if HAS_GRADIENT:
            inside = column < num_columns
            place = total + row * total_stride + column
            if not IS_FIRST:
                gradient += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            tl.store(place, gradient, mask=inside)
    if HAS_SURPRISE and HAS_GRADIENT:
        if surprise >= 0:
            target = tl.load(student + row * stride + tl.load(targets + surprise)).to(tl.float32)
            tl.store(surprise_losses + surprise, -_log_p(target, surprise_sums, row * 4))
    if HAS_COMPARISON and (not HAS_GRADIENT or COMPARISON_KIND == 0):
        if comparison >= 0:
            tl.store(comparison_losses + comparison, tl.sum(comparison_value, 0))
            tl.store(comparison_leans + comparison, tl.sum(comparison_lean, 0))
    if HAS_MAPPED and (not HAS_GRADIENT or MAPPED_KIND == 0):
        if mapped >= 0:
            tl.store(mapped_losses + mapped, tl.sum(mapped_value, 0))
            tl.store(mapped_leans + mapped, tl.sum(mapped_lean, 0))
