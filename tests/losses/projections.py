"""Projections of made-up vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_opd.projection import ProjectionMatrix
from nemo_opd.projection.retokenization import byte_order

from .cases import bytes_of, pieces_of


def paired_matrix(student: int, teacher: int, num_pairs: int, seed: int) -> ProjectionMatrix:
    """Make `num_pairs` exact rows at random ids; the remaining rows are empty, or have weights (1), (0.7, 0.3) or (.5,
    .5).
    """
    rng = np.random.default_rng(seed)
    exact = np.zeros(student, dtype=bool)
    exact[rng.choice(student, size=num_pairs, replace=False)] = True
    partners = iter(rng.permutation(teacher)[:num_pairs])
    indices = np.full((student, 2), -1, dtype=np.int32)
    weights = np.zeros((student, 2), dtype=np.float32)
    shapes = ((), (1.0,), (0.7, 0.3), (0.5, 0.5))
    for s in range(student):
        row = (1.0,) if exact[s] else shapes[int(rng.integers(len(shapes)))]
        targets = [next(partners)] if exact[s] else rng.choice(teacher, size=len(row), replace=False)
        indices[s, : len(row)] = targets
        weights[s, : len(row)] = row
    return ProjectionMatrix(indices, weights, exact, teacher_vocab_size=teacher)


def spelled_matrix(
    pairs: list[tuple[int, int]],
    student_size: int,
    teacher: Sequence[bytes | None],
    spellings: Sequence[Sequence[int]],
    student: Sequence[bytes | None] | None = None,
) -> ProjectionMatrix:
    """Make exact pairs, with the teacher's tokens spelled by the student's. student: bytes of its tokens, or None."""
    indices = np.full((student_size, 1), -1)
    for s, t in pairs:
        indices[s] = t
    return ProjectionMatrix(
        indices,
        (indices >= 0).astype(np.float32),
        indices[:, 0] >= 0,
        teacher_vocab_size=len(teacher),
        teacher_byte_order=byte_order([piece or b"" for piece in teacher]),
        **pieces_of(spellings),
        **({} if student is None else bytes_of(student, teacher)),
    )
