"""Log-ratios of the cells of two vocabularies that are sums over lists of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_opd.kernels import launch
from nemo_opd.kernels.arithmetic import LOWEST, add_to_sum, compare
from nemo_opd.kernels.forms import CellComparison


def log_ratios(
    student: Tensor, rows: Tensor, form: CellComparison, student_sums: Tensor, teacher_sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log q̂ − log p̂ of the Y cells with lists, fp32 [u, Y], and the divergence on those that p̂ leaves empty [u].

    student: logits [R, ≥ V]; rows: int32 [u], those of the units; sums: `row_sums` [R, 4] and [u, 4] with weights. A
    cell that is empty on both sides has 0.
    """
    cells = form.cells
    num_units, of_student, of_teacher = len(rows), cells.student_of_cell, cells.teacher_of_cell
    num_short = of_student.num_short
    num_long = cells.num_cells - num_short
    found = torch.empty(num_units, cells.num_cells, dtype=torch.float32, device=student.device)
    empty = torch.zeros(num_units, 1 + num_long, dtype=torch.float32, device=student.device)
    if not num_units or not cells.num_cells:
        return found, empty.sum(1)
    given = (
        *(student, student.stride(0), rows, form.teacher, form.teacher.stride(0), student_sums, teacher_sums),
        *(of_student.begins, of_student.others, of_student.weights),
        *(of_teacher.begins, of_teacher.others, of_teacher.weights),
        *(found, cells.num_cells, empty, num_short, num_long, 1 / form.temperature, form.measure.weight),
        form.measure.kind,
    )

    def run() -> None:
        if num_short:
            _short[(num_units,)](*given, min(launch.BLOCK, 512))
        if num_long:
            _long[(num_units, num_long)](*given, launch.BLOCK)

    read = len(of_student.others) * student.element_size() + len(of_teacher.others) * form.teacher.element_size()
    maps = 8 * (len(of_student.others) + len(of_teacher.others)) + 8 * cells.num_cells
    launch.launch("log_ratios", num_units * (read + 4 * cells.num_cells) + maps, run)
    return found, empty.sum(1)


@triton.jit
def _shift(sums, row, other_sums, unit):  # type: ignore[no-untyped-def]
    """Take log-sums of this side from those of the other, on the cells: the peaks first, which are large."""
    peaks = tl.load(other_sums + unit * 4 + 2) - tl.load(sums + row * 4 + 2)
    return peaks + (tl.load(other_sums + unit * 4 + 3) - tl.load(sums + row * 4 + 3))


@triton.jit
def _finished(log_q, log_p, sums, row, other_sums, unit, weight, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return log-ratios, and the divergence on cells that p̂ leaves empty."""
    nothing = -float("inf")
    ratio = (log_q - log_p) - _shift(sums, row, other_sums, unit)
    ratio = tl.where((log_q == nothing) & (log_p == nothing), 0.0, ratio)
    q = tl.exp((log_q - tl.load(other_sums + unit * 4 + 2)) - tl.load(other_sums + unit * 4 + 3))
    is_empty = (log_p == nothing) & (log_q > nothing)
    value, _ = compare(tl.where(is_empty, q, 0.0), tl.zeros_like(q), ratio, KIND, weight)
    return ratio, tl.where(is_empty, value, 0.0)


@triton.jit
def _side_by_side(logits, begin, end, others, weights, over_temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return log Σ weight · exp(logits/τ) of lists [BLOCK]."""
    peak, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for j in range(tl.max(end - begin, 0)):
        inside = begin + j < end
        other = tl.load(others + begin + j, mask=inside, other=0)
        weight = tl.load(weights + begin + j, mask=inside, other=0.0)
        x = tl.load(logits + other, mask=inside, other=-float("inf")).to(tl.float32) * over_temperature
        peak, total = add_to_sum(peak, total, x, weight)
    return tl.where(total > 0, peak + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))


@triton.jit
def _of_one(logits, begin, end, others, weights, over_temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the same of one list, as [1]."""
    peak, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        inside = entries < end
        other = tl.load(others + entries, mask=inside, other=0)
        weight = tl.load(weights + entries, mask=inside, other=0.0)
        x = tl.load(logits + other, mask=inside, other=-float("inf")).to(tl.float32) * over_temperature
        peak, total = add_to_sum(peak, total, x, weight)
    highest = tl.max(peak, 0)
    whole = tl.sum(total * tl.exp(peak - highest), 0)
    return tl.where(whole > 0, highest + tl.log(tl.where(whole > 0, whole, 1.0)), -float("inf"))


@triton.jit
def _short(  # type: ignore[no-untyped-def]
    student,
    stride,
    rows,
    teacher,
    teacher_stride,
    sums,
    teacher_sums,
    begins,
    others,
    weights,
    teacher_begins,
    teacher_others,
    teacher_weights,
    found,
    num_cells,
    empty,
    num_short,
    num_long,
    over_temperature,
    weight,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + unit).to(tl.int64)
    left = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_short, BLOCK):
        cell = start + tl.arange(0, BLOCK)
        inside = cell < num_short
        begin, end = tl.load(begins + cell, mask=inside, other=0), tl.load(begins + cell + 1, mask=inside, other=0)
        log_p = _side_by_side(student + row * stride, begin, end, others, weights, over_temperature, BLOCK)
        begin = tl.load(teacher_begins + cell, mask=inside, other=0)
        end = tl.load(teacher_begins + cell + 1, mask=inside, other=0)
        of_unit = teacher + unit * teacher_stride
        log_q = _side_by_side(of_unit, begin, end, teacher_others, teacher_weights, over_temperature, BLOCK)
        ratio, value = _finished(log_q, log_p, sums, row, teacher_sums, unit, weight, KIND)
        tl.store(found + unit * num_cells + cell, ratio, mask=inside)
        left += value
    tl.store(empty + unit * (num_long + 1), tl.sum(left, 0))


@triton.jit
def _long(  # type: ignore[no-untyped-def]
    student,
    stride,
    rows,
    teacher,
    teacher_stride,
    sums,
    teacher_sums,
    begins,
    others,
    weights,
    teacher_begins,
    teacher_others,
    teacher_weights,
    found,
    num_cells,
    empty,
    num_short,
    num_long,
    over_temperature,
    weight,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    unit, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, cell = tl.load(rows + unit).to(tl.int64), num_short + place
    begin, end = tl.load(begins + cell), tl.load(begins + cell + 1)
    log_p = _of_one(student + row * stride, begin, end, others, weights, over_temperature, BLOCK)
    begin, end = tl.load(teacher_begins + cell), tl.load(teacher_begins + cell + 1)
    of_unit = teacher + unit * teacher_stride
    log_q = _of_one(of_unit, begin, end, teacher_others, teacher_weights, over_temperature, BLOCK)
    ratio, value = _finished(log_q, log_p, sums, row, teacher_sums, unit, weight, KIND)
    tl.store(found + unit * num_cells + cell, ratio)
    tl.store(empty + unit * (num_long + 1) + 1 + place, value)
