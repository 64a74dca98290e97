"""Compared cells of cross-tokenizer losses in the form that kernels read, cached while their arrays live."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_opd.kernels.cell_maps import Memberships, cell_map
from nemo_opd.kernels.forms import CellMap
from nemo_opd.losses.array_cache import cached_by_array
from nemo_opd.losses.pairs import pairs_within
from nemo_opd.losses.sparse_projection import entries_within

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_REST = -1


def covered_columns(projection: ProjectionMatrix, students: int, teachers: int, device: torch.device) -> CellMap:
    """Return one cell per teacher token that a projection reaches (methods.md §5.3)."""

    def make() -> CellMap:
        tokens, columns, weights = entries_within(projection.indices, projection.weights, students, teachers)
        student = Memberships(tokens, columns, weights, students)
        return cell_map(student, _one_cell_each(np.arange(teachers)), device)

    arrays = projection.indices, projection.weights
    return cached_by_array(make, arrays, covered_columns, students, teachers, device)


def common_cells(
    student_cells: NDArray[np.int32],
    teacher_cells: NDArray[np.int32],
    students: int,
    teachers: int,
    device: torch.device,
) -> CellMap:
    """Return the cells of maps token → cell that have tokens of both sides (methods.md §5.8)."""

    def make() -> CellMap:
        return cell_map(_one_cell_each(student_cells[:students]), _one_cell_each(teacher_cells[:teachers]), device)

    return cached_by_array(make, (student_cells, teacher_cells), common_cells, students, teachers, device)


def pairs_and_rest(
    projection: ProjectionMatrix, students: int, teachers: int, device: torch.device, *, has_rest: bool
) -> CellMap:
    """Return one cell per exact pair, and with has_rest one for all other tokens (methods.md §5.6)."""

    def make() -> CellMap:
        student_ids, teacher_ids = pairs_within(projection, students, teachers)
        student_cells, teacher_cells = np.full(students, _REST), np.full(teachers, _REST)
        student_cells[student_ids] = teacher_cells[teacher_ids] = np.arange(len(student_ids))
        student, teacher = _one_cell_each(student_cells), _one_cell_each(teacher_cells)
        if not has_rest:
            student, teacher = (side.within(np.arange(len(student_ids))) for side in (student, teacher))
        return cell_map(student, teacher, device)

    arrays = projection.indices, projection.weights, projection.exact
    return cached_by_array(make, arrays, pairs_and_rest, students, teachers, device, has_rest)


def _one_cell_each(cells: NDArray[np.int64] | NDArray[np.int32]) -> Memberships:
    """Build memberships from a map token → cell, each with weight 1."""
    return Memberships(np.arange(len(cells)), cells.astype(np.int64), np.ones(len(cells)), len(cells))
