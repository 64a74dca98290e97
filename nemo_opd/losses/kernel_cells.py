"""The cells that losses of two vocabularies compare, as kernels read them; made once as long as their arrays live."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_opd.kernels.cell_maps import Memberships, cell_map
from nemo_opd.kernels.forms import CellMap
from nemo_opd.losses.made_once import made_once
from nemo_opd.losses.pairs import pairs_within
from nemo_opd.losses.sparse_projection import entries_within

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_REST = -1


def covered_columns(projection: ProjectionMatrix, students: int, teachers: int, device: torch.device) -> CellMap:
    """Return the teacher's tokens that a projection reaches as cells (methods.md §5.3)."""

    def make() -> CellMap:
        tokens, columns, weights = entries_within(projection.indices, projection.weights, students, teachers)
        every = np.arange(teachers)
        of_teacher = Memberships(every, every, np.ones(teachers), teachers)
        return cell_map(Memberships(tokens, columns, weights, students), of_teacher, device)

    arrays = projection.indices, projection.weights
    return made_once(make, arrays, covered_columns, students, teachers, device)


def common_cells(
    student_cells: NDArray[np.int32],
    teacher_cells: NDArray[np.int32],
    students: int,
    teachers: int,
    device: torch.device,
) -> CellMap:
    """Return the cells of maps token → cell that both sides have tokens in (methods.md §5.8)."""

    def make() -> CellMap:
        return cell_map(_all(student_cells[:students]), _all(teacher_cells[:teachers]), device)

    return made_once(make, (student_cells, teacher_cells), common_cells, students, teachers, device)


def pairs_and_rest(
    projection: ProjectionMatrix, students: int, teachers: int, device: torch.device, *, has_rest: bool
) -> CellMap:
    """Return the exact pairs as cells, and maybe one for all other tokens (methods.md §5.6)."""

    def make() -> CellMap:
        own, others = pairs_within(projection, students, teachers)
        of_student, of_teacher = np.full(students, _REST), np.full(teachers, _REST)
        of_student[own] = of_teacher[others] = np.arange(len(own))
        student, teacher = _all(of_student), _all(of_teacher)
        if not has_rest:
            student, teacher = (side.within(np.arange(len(own))) for side in (student, teacher))
        return cell_map(student, teacher, device)

    arrays = projection.indices, projection.weights, projection.exact
    return made_once(make, arrays, pairs_and_rest, students, teachers, device, has_rest)


def _all(cells: NDArray[np.int64] | NDArray[np.int32]) -> Memberships:
    return Memberships(np.arange(len(cells)), cells.astype(np.int64), np.ones(len(cells)), len(cells))
