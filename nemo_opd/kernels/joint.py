"""Losses of the rows of a block and the sum of their gradients, with few passes over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nemo_opd.kernels import launch
from nemo_opd.kernels.forms import FORWARD_KL, CellComparison, Comparison, Measure, RowForm, Surprise

_FORMS: tuple[type[RowForm], ...] = (Surprise, Comparison, CellComparison)
"""Kinds of losses, of each of which one at a time is computed."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Units in the rows of a block."""

    form: RowForm
    places: slice | Tensor
    """Rows of the units, none of them twice; int64 [u]."""
    factors: Tensor
    """fp32 [u]: what the gradient of each is multiplied with."""
    num_columns: int
    """Leading columns that are the student's vocabulary."""

    def __len__(self) -> int:
        return len(self.factors)

    def in_rows(self) -> Placed:
        """Return the same with a teacher whose columns are next to each other."""
        if isinstance(self.form, Surprise):
            return self
        return replace(self, form=replace(self.form, teacher=_in_rows(self.form.teacher)))


def add_losses(student: Tensor, parts: Sequence[Placed], total: Tensor, *, is_first: bool) -> list[Tensor]:
    """Return the losses of each part's units, fp32 [u], and add Σ factor · gradient to that of a block.

    student: logits [R, ≥ X]; parts: one of each kind of `RowForm` at most. total: [R, X], of any floating-point type;
    rows in which some part has a unit are read only if something was put there, else put.
    """
    # Triton launches on the current device.
    with torch.cuda.device_of(student):
        return _added(_in_rows(student), [part.in_rows() for part in parts], total, is_first)


def _added(student: Tensor, parts: Sequence[Placed], total: Tensor, is_first: bool) -> list[Tensor]:
    from nemo_opd.kernels.row_sums import row_sums

    most = max(len(part) for part in parts)
    numbers = torch.arange(most, dtype=torch.int32, device=student.device)
    maps = [_unit_of_row(part, numbers, len(student)) for part in parts]
    is_needed = maps[0] if len(maps) == 1 else torch.stack(maps).amax(0)
    sums: dict[tuple[float, int], Tensor] = {}
    # A part with weights first: its sums have those that need none.
    for part in sorted(parts, key=lambda part: not isinstance(part.form, CellComparison)):
        key = _temperature(part), part.num_columns
        if key not in sums:
            weights = part.form.cells.student_weights if isinstance(part.form, CellComparison) else None
            sums[key] = row_sums(student, part.num_columns, key[0], weights, is_needed, most)
    prepared = [
        _Prepared.of(student, part, of_row, sums[_temperature(part), part.num_columns])
        for part, of_row in zip(parts, maps, strict=True)
    ]
    if any(each.needs_lean for each in prepared):
        _launch_rows(student, [each for each in prepared if each.needs_lean], total, is_first, has_gradient=False)
    _launch_rows(student, prepared, total, is_first, has_gradient=True)
    return [each.losses for each in prepared]


def _in_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _temperature(part: Placed) -> float:
    return 1.0 if isinstance(part.form, Surprise) else part.form.temperature


def _unit_of_row(part: Placed, numbers: Tensor, num_rows: int) -> Tensor:
    """Return int32 [R], −1 for rows of no unit."""
    if isinstance(part.places, slice) and (part.places.start, part.places.stop) == (0, num_rows):
        return numbers[:num_rows]
    found = torch.full((num_rows,), -1, dtype=torch.int32, device=numbers.device)
    if isinstance(part.places, Tensor):
        return found.index_copy_(0, part.places, numbers[: len(part)])
    found[part.places] = numbers[: len(part)]
    return found


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A part, with what one pass over its rows needs to know beforehand."""

    part: Placed
    units: Tensor
    """int32 [R]"""
    sums: Tensor
    """[R, 4] of the student."""
    teacher_sums: Tensor | None
    ratios: Tensor | None
    """[u, Y]: of cells with lists."""
    losses: Tensor
    """[u], written by the kernel; of a `CellComparison`, it adds to the parts that its pass over rows does not form."""
    leans: Tensor
    """[u]: Σ of the divergence's gradient with respect to log s, written by a first pass as are losses; not read of
    forward KL.
    """

    @staticmethod
    def of(student: Tensor, part: Placed, units: Tensor, sums: Tensor) -> _Prepared:
        from nemo_opd.kernels.log_ratios import log_ratios
        from nemo_opd.kernels.row_sums import row_sums

        form, losses = part.form, torch.empty_like(part.factors)
        if isinstance(form, Surprise):
            return _Prepared(part, units, sums, None, None, losses, losses)
        if isinstance(form, Comparison):
            teacher = row_sums(form.teacher, part.num_columns, form.temperature, None, None, len(part))
            return _Prepared(part, units, sums, teacher, None, losses, torch.empty_like(losses))
        weights = form.cells.teacher_weights
        teacher = row_sums(form.teacher, len(weights), form.temperature, weights, None, len(part))
        rows = _rows_of(part)
        ratios, losses, leans = log_ratios(student, rows, form, sums, teacher)
        if form.coverage:
            own = sums.index_select(0, rows)
            losses = losses + form.coverage * ((own[:, 0] - own[:, 2]) + (own[:, 1] - own[:, 3]))
        return _Prepared(part, units, sums, teacher, ratios, losses, leans)

    @property
    def measure(self) -> Measure:
        form = self.part.form
        return Measure(FORWARD_KL) if isinstance(form, Surprise) else form.measure

    @property
    def needs_lean(self) -> bool:
        return self.measure.kind != FORWARD_KL

    def num_bytes(self, *, has_gradient: bool) -> int:
        """Count what is read in addition to the student's row. Cells with lists take part in gradients alone."""
        form, num = self.part.form, len(self.part)
        if isinstance(form, Surprise):
            return 0
        if isinstance(form, Comparison):
            return num * self.part.num_columns * form.teacher.element_size()
        entries = len(form.cells.cells_of_student.others) if has_gradient else 0
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
    from nemo_opd.kernels.rows import of_rows

    num_rows = max(len(each.part) for each in prepared)
    by_form = {type(each.part.form): each for each in prepared}
    a, b, c = (by_form.get(kind) for kind in _FORMS)
    num_columns = max(each.part.num_columns for each in prepared)

    def arguments() -> tuple[Any, ...]:
        return (
            *(student, student.stride(0), launch.readable(num_columns, student)),
            *(total, total.stride(0), total.shape[1]),
            *_given_surprise(a, student),
            *_given_comparison(b, student),
            *_given_comparison(c, student),
            *_given_cells(c, student),
            *(a is not None, b is not None, c is not None),
            *(FORWARD_KL if each is None else each.measure.kind for each in (b, c)),
            has_gradient and c is not None and c.ratios is not None and c.ratios.shape[1] > 0,
            *(has_gradient, is_first, launch.ROWS_BLOCK),
        )

    written = (1 if is_first else 2) * total.shape[1] * total.element_size() if has_gradient else 0
    num_bytes = num_rows * (total.shape[1] * student.element_size() + written)
    num_bytes += sum(each.num_bytes(has_gradient=has_gradient) for each in prepared)
    name = "gradient of rows" if has_gradient else "divergences of rows"
    launch.launch(name, num_bytes, lambda: of_rows[(len(student),)](*arguments(), num_warps=launch.WARPS))


def _given_surprise(of: _Prepared | None, none: Tensor) -> tuple[Any, ...]:
    """Return the kernel's arguments for a `Surprise`. none: a tensor in place of those that are not read."""
    if of is None:
        return (none, none, none, none, none, 0)
    assert isinstance(of.part.form, Surprise)
    return (of.units, of.part.form.targets, of.part.factors, of.sums, of.losses, of.part.num_columns)


def _given_comparison(of: _Prepared | None, none: Tensor) -> tuple[Any, ...]:
    if of is None:
        return (none, none, 0, none, none, none, none, none, 0, 0, 1.0, 0.0)
    form = of.part.form
    assert not isinstance(form, Surprise)
    factors = of.part.factors if form.temperature == 1 else of.part.factors / form.temperature
    sums = factors, of.sums, of.teacher_sums
    read = form.cells.partner if isinstance(form, CellComparison) else form.teacher
    num_columns = of.part.num_columns
    numbers = num_columns, launch.readable(num_columns, read), 1 / form.temperature, form.measure.weight
    return (of.units, form.teacher, form.teacher.stride(0), *sums, of.losses, of.leans, *numbers)


def _given_cells(of: _Prepared | None, none: Tensor) -> tuple[Any, ...]:
    if of is None:
        return (0.0, none, none, none, none, none, 0)
    form = of.part.form
    assert isinstance(form, CellComparison)
    entries = form.cells.cells_of_student
    return (
        form.coverage,
        form.cells.partner,
        entries.begins,
        entries.others,
        entries.weights,
        of.ratios,
        form.cells.num_cells,
    )
