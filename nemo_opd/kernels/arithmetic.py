"""Functions shared by the kernels, and log-ratios of cells that are lists of tokens of two vocabularies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_opd.kernels import launch
from nemo_opd.kernels.forms import CellComparison

LOWEST = tl.constexpr(-3.0e38)
"""Finite stand-in for a maximum of −∞, so that subtracting it from −∞ does not give NaN."""


@triton.jit
def add_to_sum(peak, total, x, weight):  # type: ignore[no-untyped-def]
    """Add weight · exp(x) to total · exp(peak) in each lane; return the new peak and total."""
    new = tl.maximum(peak, tl.where(weight > 0, x, -float("inf")))
    return new, total * tl.exp(peak - new) + tl.where(weight > 0, weight * tl.exp(x - new), 0.0)


@triton.jit
def log_of_sum(peak, total):  # type: ignore[no-untyped-def]
    """Sum over lanes; return the peak, and the log of the sum minus the peak."""
    highest = tl.max(peak, 0)
    return highest, tl.log(tl.sum(total * tl.exp(peak - highest), 0))


@triton.jit
def _expm1_of_negative(x):  # type: ignore[no-untyped-def]
    """Compute exp(x) − 1 for x ≤ 0, near 0 by a Taylor polynomial, since the difference would cancel."""
    series = 1 + x / 7 * (1 + x / 8)
    for j in tl.static_range(6, 1, -1):
        series = 1 + x / j * series
    return tl.where(x > -0.5, x * series, tl.exp(x) - 1)


@triton.jit
def _log1p_of_negative(x):  # type: ignore[no-untyped-def]
    """Compute log(1 + x) for −1 ≤ x ≤ 0, near 0 by the series of 2 artanh(x / (2 + x))."""
    y = x / (2 + x)
    q = y * y
    near = 2 * y * (1 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q / 9))))
    return tl.where(x > -0.25, near, tl.log(1 + x))


@triton.jit
def _not_nan(x):  # type: ignore[no-untyped-def]
    """Replace NaN from 0 · ±∞ by 0."""
    return tl.where(x == x, x, 0.0)


@triton.jit
def compare(t, s, log_ratio, KIND: tl.constexpr, weight):  # type: ignore[no-untyped-def]
    """Return the divergence of each cell, and its derivative with respect to log s (methods.md §3.1).

    t, s: the teacher's and the student's probability of the cell. log_ratio: log t − log s. KIND: see `forms`. Both
    results are homogeneous in t and s, so that parts of a cell add up to the cell.
    """
    excess = s - t
    if KIND == 3:
        smaller_weight = tl.where(log_ratio >= 0, 1 - weight, weight)
        mixture = _log1p_of_negative(_expm1_of_negative(-tl.abs(log_ratio)) * smaller_weight)
        # 0 if a side is empty, but NaN if it is NaN: no other part of jsd would show that.
        gradient = tl.where(s == 0, 0.0, (tl.minimum(-log_ratio, 0.0) - mixture) * s) * (1 - weight)
        teacher_part = tl.where(t == 0, 0.0, (tl.minimum(log_ratio, 0.0) - mixture) * t)
        return teacher_part * weight + gradient, gradient
    if KIND == 4:
        sign = tl.where(excess > 0, 0.5, tl.where(excess < 0, -0.5, 0.0))
        return tl.abs(excess) / 2, sign * s
    forward = _not_nan(log_ratio * t)
    reverse = _not_nan(-log_ratio * s)
    if KIND == 0:
        return forward + excess, excess
    if KIND == 1:
        return reverse - excess, reverse
    value = weight * forward + (1 - weight) * reverse + (2 * weight - 1) * excess
    return value, (1 - weight) * reverse + weight * excess


def log_ratios(
    student: Tensor, rows: Tensor, form: CellComparison, student_sums: Tensor, teacher_sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log q̂ − log p̂ of the Y cells with lists, fp32 [u, Y], and two sums over these cells, fp32 [u].

    The sums are the divergence, and its gradient with respect to log p̂. student: logits [R, ≥ V]. rows: int32 [u], the
    rows of the units. sums: weighted `row_sums`, [R, 4] and [u, 4]. For cells that are empty on both sides the ratio is
    0.
    """
    cells = form.cells
    num_units, student_lists, teacher_lists = len(rows), cells.student_of_cell, cells.teacher_of_cell
    num_short, num_cells = student_lists.num_short, cells.num_cells
    ratios = torch.empty(num_units, num_cells, dtype=torch.float32, device=student.device)
    num_long_tiles = triton.cdiv(num_cells - num_short, launch.LONG_TILE[0])
    sums = torch.zeros(2, num_units, 1 + num_long_tiles, dtype=torch.float32, device=student.device)
    arguments = (
        *(student, student.stride(0), rows, form.teacher, form.teacher.stride(0), student_sums, teacher_sums),
        *(student_lists.begins, student_lists.entries, student_lists.weights),
        *(teacher_lists.begins, teacher_lists.entries, teacher_lists.weights),
        *(ratios, num_cells, sums, 1 + num_long_tiles, 1 / form.temperature, form.measure.weight),
        form.measure.kind,
    )

    def run() -> None:
        if num_short:
            _lists[(num_units, 1)](*arguments, *launch.SHORT_TILE, 0, num_short, 0)
        if num_long_tiles:
            _lists[(num_units, num_long_tiles)](*arguments, *launch.LONG_TILE, num_short, num_cells, 1)

    if num_units and num_cells:
        num_student, num_teacher = len(student_lists.entries), len(teacher_lists.entries)
        gathered = num_student * student.element_size() + num_teacher * form.teacher.element_size()
        maps = 8 * (num_student + num_teacher) + 8 * num_cells
        launch.launch("log_ratios", num_units * (gathered + 4 * num_cells) + maps, run)
    values, grad_sums = sums.sum(2)
    return ratios, values, grad_sums


@triton.jit
def _shift(sums, row, teacher_sums, unit):  # type: ignore[no-untyped-def]
    """Return the teacher's minus the student's log-sum over the cells. Subtracts the peaks, which are large, first."""
    peaks = tl.load(teacher_sums + unit * 4 + 2) - tl.load(sums + row * 4 + 2)
    return peaks + (tl.load(teacher_sums + unit * 4 + 3) - tl.load(sums + row * 4 + 3))


@triton.jit
def _log_sums(  # type: ignore[no-untyped-def]
    logits, begin, end, tokens, weights, over_temperature, LISTS: tl.constexpr, ENTRIES: tl.constexpr
):
    """Return log Σ weight · exp(logits/τ) of lists [LISTS], with ENTRIES of each at a time."""
    peak = tl.full([LISTS, ENTRIES], LOWEST, tl.float32)
    total = tl.zeros([LISTS, ENTRIES], tl.float32)
    for first in range(0, tl.max(end - begin, 0), ENTRIES):
        entry = begin[:, None] + first + tl.arange(0, ENTRIES)[None, :]
        inside = entry < end[:, None]
        token = tl.load(tokens + entry, mask=inside, other=0)
        weight = tl.load(weights + entry, mask=inside, other=0.0)
        x = tl.load(logits + token, mask=inside, other=-float("inf")).to(tl.float32) * over_temperature
        peak, total = add_to_sum(peak, total, x, weight)
    highest = tl.max(peak, 1)
    list_sum = tl.sum(total * tl.exp(peak - highest[:, None]), 1)
    return tl.where(list_sum > 0, highest + tl.log(tl.where(list_sum > 0, list_sum, 1.0)), -float("inf"))


@triton.jit
def _lists(  # type: ignore[no-untyped-def]
    student,
    stride,
    rows,
    teacher,
    teacher_stride,
    sums,
    teacher_sums,
    begins,
    entries,
    weights,
    teacher_begins,
    teacher_entries,
    teacher_weights,
    ratios,
    num_cells,
    partial_sums,
    num_parts,
    over_temperature,
    weight,
    KIND: tl.constexpr,
    LISTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    first,
    last,
    first_part,
):
    """Compute the cells `first` to `last` of a unit, LISTS at a time. Each program writes a part of the unit's sums."""
    unit = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + unit).to(tl.int64)
    nothing = -float("inf")
    shift = _shift(sums, row, teacher_sums, unit)
    values, grad_sums = tl.zeros([LISTS], tl.float32), tl.zeros([LISTS], tl.float32)
    for start in range(first + tl.program_id(1) * LISTS, last, tl.num_programs(1) * LISTS):
        cell = start + tl.arange(0, LISTS)
        inside = cell < last
        begin, end = tl.load(begins + cell, mask=inside, other=0), tl.load(begins + cell + 1, mask=inside, other=0)
        log_p = _log_sums(student + row * stride, begin, end, entries, weights, over_temperature, LISTS, ENTRIES)
        begin = tl.load(teacher_begins + cell, mask=inside, other=0)
        end = tl.load(teacher_begins + cell + 1, mask=inside, other=0)
        teacher_row = teacher + unit * teacher_stride
        log_q = _log_sums(teacher_row, begin, end, teacher_entries, teacher_weights, over_temperature, LISTS, ENTRIES)
        ratio = tl.where((log_q == nothing) & (log_p == nothing), 0.0, (log_q - log_p) - shift)
        tl.store(ratios + unit * num_cells + cell, ratio, mask=inside)
        p = tl.exp((log_p - tl.load(sums + row * 4 + 2)) - tl.load(sums + row * 4 + 3))
        q = tl.exp((log_q - tl.load(teacher_sums + unit * 4 + 2)) - tl.load(teacher_sums + unit * 4 + 3))
        value, gradient = compare(q, p, ratio, KIND, weight)
        values += tl.where(inside, value, 0.0)
        # Cells without student mass have no gradient.
        grad_sums += tl.where(inside & (log_p > nothing), gradient, 0.0)
    place = partial_sums + unit * num_parts + first_part + tl.program_id(1)
    tl.store(place, tl.sum(values, 0))
    tl.store(place + tl.num_programs(0) * num_parts, tl.sum(grad_sums, 0))
