"""One pass over rows of logits that forms the losses of their units, or the sum of their gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from nemo_opd.kernels.arithmetic import compare


@triton.jit
def _sums(place):  # type: ignore[no-untyped-def]
    """Return the peak of a row and log of its sum, less that peak."""
    return tl.load(place), tl.load(place + 1)


# Slices that begin anywhere, and of which single numbers are read: they need no variants by alignment.
@triton.jit(do_not_specialize_on_alignment=("targets", "mapped_leans"))
def of_rows(  # type: ignore[no-untyped-def]
    student,
    stride,
    student_end,
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
    comparison_end,
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
    mapped_end,
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

    *_end: how many columns are read, as `launch.readable` returns them; those beyond *_columns are left out.

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
    # All numbers of the row first: what is stored in the loop might change them, as far as the compiler knows.
    if HAS_SURPRISE:
        has_surprise, surprise = surprise >= 0, tl.maximum(surprise, 0)
        target, surprise_factor = tl.load(targets + surprise), tl.load(surprise_factors + surprise)
        surprise_peak, surprise_log = _sums(surprise_sums + row * 4)
    if HAS_COMPARISON:
        has_comparison, comparison = comparison >= 0, tl.maximum(comparison, 0)
        s_peak, s_log = _sums(comparison_sums + row * 4)
        t_peak, t_log = _sums(comparison_teacher_sums + comparison * 4)
        comparison_factor, comparison_pull = tl.load(comparison_factors + comparison), 0.0
        if HAS_GRADIENT and COMPARISON_KIND != 0:
            comparison_pull = tl.load(comparison_leans + comparison)
        teacher = comparison_teacher + comparison * comparison_stride
    if HAS_MAPPED:
        has_mapped, mapped = mapped >= 0, tl.maximum(mapped, 0)
        on_cells_peak, on_cells_log = _sums(mapped_sums + row * 4 + 2)
        own_peak, own_log = _sums(mapped_sums + row * 4)
        other_peak, other_log = _sums(mapped_teacher_sums + mapped * 4 + 2)
        mapped_factor, mapped_pull = tl.load(mapped_factors + mapped), coverage
        if HAS_GRADIENT and MAPPED_KIND != 0:
            mapped_pull += tl.load(mapped_leans + mapped)
        other_teacher = mapped_teacher + mapped * mapped_stride
    comparison_value, comparison_lean = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    mapped_value, mapped_lean = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        # Loads before what is computed of them, so that they do not wait for each other.
        z = tl.load(student + row * stride + column, mask=column < student_end, other=nothing).to(tl.float32)
        if HAS_COMPARISON:
            y = tl.load(teacher + column, mask=(column < comparison_end) & has_comparison, other=nothing).to(tl.float32)
        if HAS_MAPPED:
            other = tl.load(partner + column, mask=(column < mapped_end) & has_mapped, other=-1)
            is_mapped = (column < mapped_columns) & has_mapped
            is_pair = is_mapped & (other >= 0)
            w = tl.load(other_teacher + other, mask=is_pair, other=nothing).to(tl.float32)
        gradient = tl.zeros([BLOCK], tl.float32)
        if HAS_SURPRISE:
            p = tl.exp((tl.where(column < surprise_columns, z, nothing) - surprise_peak) - surprise_log)
            is_target = tl.where(column == target, 1.0, 0.0)
            gradient += tl.where(has_surprise, surprise_factor * (p - is_target), 0.0)
        if HAS_COMPARISON:
            is_compared = (column < comparison_columns) & has_comparison
            x = tl.where(is_compared, z, nothing) * comparison_over_temperature
            y = tl.where(is_compared, y, nothing) * comparison_over_temperature
            s = tl.exp((x - s_peak) - s_log)
            t = tl.exp((y - t_peak) - t_log)
            shift = (t_peak - s_peak) + (t_log - s_log)
            value, slope = compare(t, s, (y - x) - shift, COMPARISON_KIND, comparison_weight)
            if HAS_GRADIENT:
                gradient += tl.where(has_comparison, comparison_factor * (slope - s * comparison_pull), 0.0)
            else:
                comparison_lean += slope
            comparison_value += value
        if HAS_MAPPED:
            x = tl.where(is_mapped, z, nothing) * mapped_over_temperature
            y = w * mapped_over_temperature
            log_s = (x - on_cells_peak) - on_cells_log
            s = tl.where(is_pair, tl.exp(log_s), 0.0)
            t = tl.exp((y - other_peak) - other_log)
            shift = (other_peak - on_cells_peak) + (other_log - on_cells_log)
            value, slope = compare(t, s, (y - x) - shift, MAPPED_KIND, mapped_weight)
            mapped_value += tl.where(is_pair, value, 0.0)
            if HAS_GRADIENT:
                own = tl.where(is_pair, slope - s * mapped_pull, 0.0)
                if HAS_CELLS:
                    begin = tl.load(begins + column, mask=is_mapped, other=0)
                    end = tl.load(begins + column + 1, mask=is_mapped, other=0)
                    for j in range(tl.max(end - begin, 0)):
                        listed = begin + j < end
                        cell = tl.load(cells + begin + j, mask=listed, other=0)
                        weight = tl.load(weights + begin + j, mask=listed, other=0.0)
                        ratio = tl.load(ratios + mapped * num_cells + cell, mask=listed, other=0.0)
                        # The part of its cell that is the token's, on either side.
                        s = tl.where(listed, tl.exp(log_s), 0.0)
                        t = tl.where(listed & (log_s > nothing), tl.exp(log_s + ratio), 0.0)
                        _, by_cell = compare(t, s, ratio, MAPPED_KIND, mapped_weight)
                        own += weight * (by_cell - s * mapped_pull)
                own += coverage * tl.exp((x - own_peak) - own_log)
                gradient += tl.where(has_mapped, mapped_factor * own, 0.0)
            else:
                mapped_lean += tl.where(is_pair, slope, 0.0)
        if HAS_GRADIENT:
            inside = column < num_columns
            place = total + row * total_stride + column
            if not IS_FIRST:
                gradient += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            tl.store(place, gradient, mask=inside)
    if HAS_SURPRISE and HAS_GRADIENT:
        logit = tl.load(student + row * stride + target).to(tl.float32)
        tl.store(surprise_losses + surprise, surprise_log - (logit - surprise_peak), mask=has_surprise)
    if HAS_COMPARISON and (not HAS_GRADIENT or COMPARISON_KIND == 0):
        tl.store(comparison_losses + comparison, tl.sum(comparison_value, 0), mask=has_comparison)
        if not HAS_GRADIENT:
            tl.store(comparison_leans + comparison, tl.sum(comparison_lean, 0), mask=has_comparison)
    if HAS_MAPPED and (not HAS_GRADIENT or MAPPED_KIND == 0):
        # What is there is of the cells with lists.
        value = tl.load(mapped_losses + mapped) + tl.sum(mapped_value, 0)
        tl.store(mapped_losses + mapped, value, mask=has_mapped)
        if not HAS_GRADIENT:
            lean = tl.load(mapped_leans + mapped) + tl.sum(mapped_lean, 0)
            tl.store(mapped_leans + mapped, lean, mask=has_mapped)
