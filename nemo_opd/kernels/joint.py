"""Losses of a block's rows, and the sum of their gradients, in few passes over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nemo_opd.kernels import launch
from nemo_opd.kernels.forms import FORWARD_KL, CellComparison, Comparison, Measure, NegLogProb, RowForm

_FORMS: tuple[type[RowForm], ...] = (NegLogProb, Comparison, CellComparison)
"""Kinds of losses; a pass computes at most one of each."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Units of a loss and their rows in a block."""

    form: RowForm
    places: slice | Tensor
    """Unique rows of the units; int64 [u]."""
    factors: Tensor
    """fp32 [u]: factor of each unit's gradient."""
    num_columns: int
    """Number of leading columns, the student's vocabulary."""

    def __len__(self) -> int:
        return len(self.factors)

    def in_rows(self) -> Placed:
        """Return a copy with contiguous columns of the teacher."""
        if isinstance(self.form, NegLogProb):
            return self
        return replace(self, form=replace(self.form, teacher=_in_rows(self.form.teacher)))


def add_losses(student: Tensor, parts: Sequence[Placed], total: Tensor, *, is_first: bool) -> list[Tensor]:
    """Return the losses of each part's units, fp32 [u], and add Σ factor · gradient to a block's gradient.

    student: logits [R, ≥ X]. parts: at most one of each kind of `RowForm`. total: [R, X], of any floating-point type.
    is_first: overwrite the rows that have a unit in any part, instead of adding to them.
    """
    # Triton launches on the current device.
    with torch.cuda.device_of(student):
        return _add_losses(_in_rows(student), [part.in_rows() for part in parts], total, is_first)


def _add_losses(student: Tensor, parts: Sequence[Placed], total: Tensor, is_first: bool) -> list[Tensor]:
    from nemo_opd.kernels.row_losses import row_sums

    most = max(len(part) for part in parts)
    numbers = torch.arange(most, dtype=torch.int32, device=student.device)
    maps = [_unit_of_row(part, numbers, len(student)) for part in parts]
    is_needed = maps[0] if len(maps) == 1 else torch.stack(maps).amax(0)
    sums: dict[tuple[float, int], Tensor] = {}
    # A part with weights first: its sums include the unweighted sums that other parts need.
    for part in sorted(parts, key=lambda part: not isinstance(part.form, CellComparison)):
        key = _temperature(part), part.num_columns
        if key not in sums:
            weights = part.form.cells.student_weights if isinstance(part.form, CellComparison) else None
            sums[key] = row_sums(student, part.num_columns, key[0], weights, is_needed, most)
    prepared = [
        _Prepared.of(student, part, units, sums[_temperature(part), part.num_columns])
        for part, units in zip(parts, maps, strict=True)
    ]
    if first_pass := [part for part in prepared if part.measure.kind != FORWARD_KL]:
        _launch_rows(student, first_pass, total, is_first, has_gradient=False)
    _launch_rows(student, prepared, total, is_first, has_gradient=True)
    return [part.losses for part in prepared]


def _in_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _temperature(part: Placed) -> float:
    return 1.0 if isinstance(part.form, NegLogProb) else part.form.temperature


def _unit_of_row(part: Placed, numbers: Tensor, num_rows: int) -> Tensor:
    """Return the unit of each row, int32 [R], −1 for rows without a unit."""
    if isinstance(part.places, slice) and (part.places.start, part.places.stop) == (0, num_rows):
        return numbers[:num_rows]
    units = torch.full((num_rows,), -1, dtype=torch.int32, device=numbers.device)
    if isinstance(part.places, Tensor):
        return units.index_copy_(0, part.places, numbers[: len(part)])
    units[part.places] = numbers[: len(part)]
    return units


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Part with the inputs and outputs of a pass over its rows."""

    part: Placed
    units: Tensor
    """int32 [R]: unit of each row, −1 for rows without a unit."""
    sums: Tensor
    """[R, 4]: `row_sums` of the student."""
    teacher_sums: Tensor | None
    ratios: Tensor | None
    """[u, Y]: log-ratios of cells with lists."""
    losses: Tensor
    """[u], written by the kernel. For a `CellComparison`, the kernel adds to the losses of cells with lists."""
    grad_sums: Tensor
    """[u]: sum of the divergence's gradient with respect to log s, written with the losses in a first pass. Not read
    for forward KL.
    """

    @staticmethod
    def of(student: Tensor, part: Placed, units: Tensor, sums: Tensor) -> _Prepared:
        from nemo_opd.kernels.arithmetic import log_ratios
        from nemo_opd.kernels.row_losses import row_sums

        form, losses = part.form, torch.empty_like(part.factors)
        if isinstance(form, NegLogProb):
            return _Prepared(part, units, sums, None, None, losses, losses)
        if isinstance(form, Comparison):
            teacher = row_sums(form.teacher, part.num_columns, form.temperature, None, None, len(part))
            return _Prepared(part, units, sums, teacher, None, losses, torch.empty_like(losses))
        weights = form.cells.teacher_weights
        teacher = row_sums(form.teacher, len(weights), form.temperature, weights, None, len(part))
        rows = _rows_of(part)
        ratios, losses, grad_sums = log_ratios(student, rows, form, sums, teacher)
        if form.coverage:
            unit_sums = sums.index_select(0, rows)
            peaks, log_sums = unit_sums[:, 0] - unit_sums[:, 2], unit_sums[:, 1] - unit_sums[:, 3]
            losses = losses + form.coverage * (peaks + log_sums)
        return _Prepared(part, units, sums, teacher, ratios, losses, grad_sums)

    @property
    def measure(self) -> Measure:
        form = self.part.form
        return Measure(FORWARD_KL) if isinstance(form, NegLogProb) else form.measure

    def num_bytes(self, *, has_gradient: bool) -> int:
        """Count the bytes read in addition to the student's rows. Cells with lists are read for gradients only."""
        form, num = self.part.form, len(self.part)
        if isinstance(form, NegLogProb):
            return 0
        if isinstance(form, Comparison):
            return num * self.part.num_columns * form.teacher.element_size()
        entries = len(form.cells.cells_of_student.entries) if has_gradient else 0
        gathered = form.cells.num_pairs * form.teacher.element_size() + 4 * entries
        return num * gathered + 8 * (self.part.num_columns + entries)


def _rows_of(part: Placed) -> Tensor:
    places = part.places
    if isinstance(places, slice):
        return torch.arange(places.start, places.stop, dtype=torch.int32, device=part.factors.device)
    return places.int()


def _launch_rows(
    student: Tensor, prepared: Sequence[_Prepared], total: Tensor, is_first: bool, *, has_gradient: bool
) -> None:
    from nemo_opd.kernels.row_losses import rows_kernel

    num_rows = max(len(entry.part) for entry in prepared)
    by_form = {type(entry.part.form): entry for entry in prepared}
    surprise, comparison, mapped = (by_form.get(kind) for kind in _FORMS)
    num_columns = max(entry.part.num_columns for entry in prepared)

    def arguments() -> tuple[Any, ...]:
        return (
            *(student, student.stride(0), launch.readable(num_columns, student)),
            *(total, total.stride(0), total.shape[1]),
            *_surprise_arguments(surprise, student),
            *_comparison_arguments(comparison, student),
            *_comparison_arguments(mapped, student),
            *_cell_arguments(mapped, student),
            *(surprise is not None, comparison is not None, mapped is not None),
            *(FORWARD_KL if entry is None else entry.measure.kind for entry in (comparison, mapped)),
            has_gradient and mapped is not None and mapped.ratios is not None and mapped.ratios.shape[1] > 0,
            *(has_gradient, is_first, launch.ROWS_BLOCK),
        )

    written = (1 if is_first else 2) * total.shape[1] * total.element_size() if has_gradient else 0
    num_bytes = num_rows * (total.shape[1] * student.element_size() + written)
    num_bytes += sum(entry.num_bytes(has_gradient=has_gradient) for entry in prepared)
    name = "gradient of rows" if has_gradient else "divergences of rows"
    launch.launch(name, num_bytes, lambda: rows_kernel[(len(student),)](*arguments(), num_warps=launch.WARPS))


def _surprise_arguments(prepared: _Prepared | None, unused: Tensor) -> tuple[Any, ...]:
    """Return the kernel's arguments for a `NegLogProb`. unused: any tensor, passed for arguments that are not read."""
    if prepared is None:
        return (unused, unused, unused, unused, unused, 0)
    part = prepared.part
    assert isinstance(part.form, NegLogProb)
    return (prepared.units, part.form.targets, part.factors, prepared.sums, prepared.losses, part.num_columns)


def _comparison_arguments(prepared: _Prepared | None, unused: Tensor) -> tuple[Any, ...]:
    if prepared is None:
        return (unused, unused, 0, unused, unused, unused, unused, unused, 0, 0, 1.0, 0.0)
    part, form = prepared.part, prepared.part.form
    assert not isinstance(form, NegLogProb)
    factors = part.factors if form.temperature == 1 else part.factors / form.temperature
    read = form.cells.partner if isinstance(form, CellComparison) else form.teacher
    return (
        *(prepared.units, form.teacher, form.teacher.stride(0)),
        *(factors, prepared.sums, prepared.teacher_sums, prepared.losses, prepared.grad_sums),
        *(part.num_columns, launch.readable(part.num_columns, read), 1 / form.temperature, form.measure.weight),
    )


def _cell_arguments(prepared: _Prepared | None, unused: Tensor) -> tuple[Any, ...]:
    if prepared is None:
        return (0.0, unused, unused, unused, unused, unused, 0)
    form = prepared.part.form
    assert isinstance(form, CellComparison)
    lists = form.cells.cells_of_student
    return (
        form.coverage,
        form.cells.partner,
        lists.begins,
        lists.entries,
        lists.weights,
        prepared.ratios,
        form.cells.num_cells,
    )
