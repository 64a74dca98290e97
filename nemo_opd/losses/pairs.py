"""One-to-one matches between the tokens of two vocabularies, on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.errors import ProjectionError
from nemo_opd.losses.array_cache import cached_by_array

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_RELAXED_WEIGHT = 0.6
"""Minimum weight of a relaxed pair. Above ½, so that a row has at most one pair."""


@dataclass(frozen=True, slots=True)
class TokenPairs:
    """X one-to-one pairs of student and teacher tokens in order of student id, and the unpaired tokens."""

    student: Tensor
    """int64 [X], ascending."""
    teacher: Tensor
    """int64 [X]: the partner of each student token."""
    student_rest: Tensor
    """int64 [V − X], ascending: unpaired student tokens."""
    teacher_rest: Tensor
    """int64 [W − X], ascending: unpaired teacher tokens."""
    partner: Tensor
    """int64 [V]: each student token's teacher token, −1 if unpaired."""
    place: Tensor
    """int64 [V]: the index of each student token's pair, −1 if unpaired."""

    @staticmethod
    def exact(
        projection: ProjectionMatrix, student_vocab_size: int, teacher_vocab_size: int, device: torch.device
    ) -> TokenPairs:
        """Pair the shared vocabulary within the given sizes; cached while the matrix lives (methods.md §2.1).

        Raises ProjectionError if no pair remains.
        """
        return _cached(projection, pairs_within, student_vocab_size, teacher_vocab_size, device)

    @staticmethod
    def relaxed(
        projection: ProjectionMatrix, student_vocab_size: int, teacher_vocab_size: int, device: torch.device
    ) -> TokenPairs:
        """Pair each student token with its teacher token of weight ≥ _RELAXED_WEIGHT (methods.md §5.5).

        If several students claim a teacher token, an exact row wins, then the higher weight, then the lower id. Cached
        while the matrix lives. Raises ProjectionError if no pair remains within the given sizes.
        """
        return _cached(projection, _relaxed, student_vocab_size, teacher_vocab_size, device)

    def __len__(self) -> int:
        return len(self.student)

    def to(self, device: torch.device) -> TokenPairs:
        return TokenPairs(*(getattr(self, field.name).to(device) for field in fields(self)))


_Ids = NDArray[np.int64]
_Match = Callable[["ProjectionMatrix", int, int], tuple[_Ids, _Ids]]
"""(projection, student size, teacher size) → student and teacher ids of the pairs, in order of student id."""


def _cached(
    projection: ProjectionMatrix, match: _Match, students: int, teachers: int, device: torch.device
) -> TokenPairs:
    indices, weights, exact = projection.indices, projection.weights, projection.exact
    return cached_by_array(
        lambda: _build(match, projection, students, teachers).to(device),
        (indices, weights, exact),
        match,
        students,
        teachers,
        device,
    )


def _build(match: _Match, projection: ProjectionMatrix, students: int, teachers: int) -> TokenPairs:
    student, teacher = match(projection, students, teachers)
    if not len(student):
        raise ProjectionError(
            f"the projection has no matching tokens within {students} student and {teachers} teacher tokens; it "
            "belongs to another pair of tokenizers, marks no row as exact, or they have nothing in common: build it "
            "again, or use p_kl or uld"
        )
    partner, place = np.full(students, -1), np.full(students, -1)
    partner[student], place[student] = teacher, np.arange(len(student))
    sides = (student, teacher, _complement(student, students), _complement(teacher, teachers), partner, place)
    return TokenPairs(*(torch.from_numpy(ids.astype(np.int64)) for ids in sides))


def pairs_within(projection: ProjectionMatrix, students: int, teachers: int) -> tuple[_Ids, _Ids]:
    """Return both sides' ids of the shared vocabulary within the given sizes, [X] each, in order of student id."""
    student, teacher = projection.shared_pairs.astype(np.int64).T
    is_within = (student < students) & (teacher < teachers)
    return student[is_within], teacher[is_within]


def _relaxed(projection: ProjectionMatrix, students: int, teachers: int) -> tuple[_Ids, _Ids]:
    near = (projection.indices < teachers) & (projection.weights >= _RELAXED_WEIGHT)
    student, slot = np.nonzero(near[:students])
    teacher = projection.indices[student, slot].astype(np.int64)
    order = np.lexsort((student, -projection.weights[student, slot], ~projection.exact[student]))
    _, first = np.unique(teacher[order], return_index=True)
    winner = np.sort(order[first])
    return student[winner], teacher[winner]


def _complement(ids: _Ids, size: int) -> _Ids:
    return np.setdiff1d(np.arange(size), ids)
