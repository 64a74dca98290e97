"""Kernels that compute the losses of rows of logits, or the sum of their gradients, in one pass, and the rows' sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_opd.kernels import launch
from nemo_opd.kernels.arithmetic import LOWEST, add_to_sum, compare, log_of_sum


@triton.jit
def _sums(place):  # type: ignore[no-untyped-def]
    """Return a row's peak, and the log of its sum minus the peak."""
    return tl.load(place), tl.load(place + 1)


# Slices with any alignment, read one number at a time: variants for aligned pointers would gain nothing.
@triton.jit(do_not_specialize_on_alignment=("targets", "mapped_grad_sums"))
def rows_kernel(  # type: ignore[no-untyped-def]
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
    comparison_grad_sums,
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
    mapped_grad_sums,
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
    """Compute the losses of a row.

    *_units[row]: the row's unit of that form, below 0 if it has none. *_end: number of columns to read, from
    `launch.readable`; columns beyond *_columns are ignored.

    Without gradients: write the divergences of Comparison and CellComparison (mapped), and the sums of their gradients
    with respect to log s (grad_sums). With gradients: write Σ factor · gradient to `total`, or add it; and write the
    surprises, and the forward KLs, whose grad_sums are always 0.
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
    # Load all of the row's numbers first: the compiler cannot know that the loop's stores do not change them.
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
            comparison_pull = tl.load(comparison_grad_sums + comparison)
        teacher = comparison_teacher + comparison * comparison_stride
    if HAS_MAPPED:
        has_mapped, mapped = mapped >= 0, tl.maximum(mapped, 0)
        on_cells_peak, on_cells_log = _sums(mapped_sums + row * 4 + 2)
        all_peak, all_log = _sums(mapped_sums + row * 4)
        teacher_peak, teacher_log = _sums(mapped_teacher_sums + mapped * 4 + 2)
        mapped_factor, mapped_pull = tl.load(mapped_factors + mapped), coverage
        if HAS_GRADIENT and MAPPED_KIND != 0:
            mapped_pull += tl.load(mapped_grad_sums + mapped)
        teacher_row = mapped_teacher + mapped * mapped_stride
    comparison_value, comparison_grad_sum = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    mapped_value, mapped_grad_sum = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        # All loads first, so that they do not wait for each other.
        z = tl.load(student + row * stride + column, mask=column < student_end, other=nothing).to(tl.float32)
        if HAS_COMPARISON:
            y = tl.load(teacher + column, mask=(column < comparison_end) & has_comparison, other=nothing).to(tl.float32)
        if HAS_MAPPED:
            teacher_token = tl.load(partner + column, mask=(column < mapped_end) & has_mapped, other=-1)
            is_mapped = (column < mapped_columns) & has_mapped
            is_pair = is_mapped & (teacher_token >= 0)
            w = tl.load(teacher_row + teacher_token, mask=is_pair, other=nothing).to(tl.float32)
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
                comparison_grad_sum += slope
            comparison_value += value
        if HAS_MAPPED:
            x = tl.where(is_mapped, z, nothing) * mapped_over_temperature
            y = w * mapped_over_temperature
            log_s = (x - on_cells_peak) - on_cells_log
            s = tl.where(is_pair, tl.exp(log_s), 0.0)
            t = tl.exp((y - teacher_peak) - teacher_log)
            shift = (teacher_peak - on_cells_peak) + (teacher_log - on_cells_log)
            value, slope = compare(t, s, (y - x) - shift, MAPPED_KIND, mapped_weight)
            mapped_value += tl.where(is_pair, value, 0.0)
            if HAS_GRADIENT:
                mapped_gradient = tl.where(is_pair, slope - s * mapped_pull, 0.0)
                if HAS_CELLS:
                    begin = tl.load(begins + column, mask=is_mapped, other=0)
                    end = tl.load(begins + column + 1, mask=is_mapped, other=0)
                    for j in range(tl.max(end - begin, 0)):
                        listed = begin + j < end
                        cell = tl.load(cells + begin + j, mask=listed, other=0)
                        weight = tl.load(weights + begin + j, mask=listed, other=0.0)
                        ratio = tl.load(ratios + mapped * num_cells + cell, mask=listed, other=0.0)
                        # The token's part of its cell, on either side.
                        s = tl.where(listed, tl.exp(log_s), 0.0)
                        t = tl.where(listed & (log_s > nothing), tl.exp(log_s + ratio), 0.0)
                        _, cell_slope = compare(t, s, ratio, MAPPED_KIND, mapped_weight)
                        mapped_gradient += weight * (cell_slope - s * mapped_pull)
                mapped_gradient += coverage * tl.exp((x - all_peak) - all_log)
                gradient += tl.where(has_mapped, mapped_factor * mapped_gradient, 0.0)
            else:
                mapped_grad_sum += tl.where(is_pair, slope, 0.0)
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
            tl.store(comparison_grad_sums + comparison, tl.sum(comparison_grad_sum, 0), mask=has_comparison)
    if HAS_MAPPED and (not HAS_GRADIENT or MAPPED_KIND == 0):
        # The losses already contain the cells with lists.
        value = tl.load(mapped_losses + mapped) + tl.sum(mapped_value, 0)
        tl.store(mapped_losses + mapped, value, mask=has_mapped)
        if not HAS_GRADIENT:
            grad_sum = tl.load(mapped_grad_sums + mapped) + tl.sum(mapped_grad_sum, 0)
            tl.store(mapped_grad_sums + mapped, grad_sum, mask=has_mapped)


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
