"""Matched tokens of two vocabularies, and maps that losses cache per projection."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from nemo_opd.losses.cells import CommonCells
from nemo_opd.losses.sparse_projection import SparseProjection, TokenPairs
from nemo_opd.projection import ProjectionMatrix
from tests.reference import losses as reference

from .plain import plain_maps
from .projections import paired_matrix

CPU = torch.device("cpu")


def as_dict(pairs: TokenPairs) -> dict[int, int]:
    return dict(zip(pairs.student.tolist(), pairs.teacher.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_pairs_equal_the_loop(seed: int) -> None:
    """Bug: a pair stays although one of its tokens lies beyond the size, or its token is in no list."""
    matrix = paired_matrix(40, 30, 8, seed)
    maps = plain_maps(matrix, ())
    relaxed = dict(zip(*reference.pairs_of(maps, 0.6), strict=True))
    exact = dict(zip(*reference.pairs_of(maps), strict=True))
    assert len(exact) < len(relaxed) < (matrix.weights >= 0.6).any(1).sum()
    assert as_dict(TokenPairs.relaxed(matrix, 40, 30, CPU)) == relaxed
    for students, teachers in ((40, 30), (31, 21)):
        pairs = TokenPairs.exact(matrix, students, teachers, CPU)
        expected = {s: t for s, t in exact.items() if s < students and t < teachers}
        assert as_dict(pairs) == expected
        assert set(pairs.student_rest.tolist()) == set(range(students)) - set(expected)
        assert set(pairs.teacher_rest.tolist()) == set(range(teachers)) - set(expected.values())


def test_who_wins_a_collision() -> None:
    """Teacher 0: an exact row beats a lower id of equal weight. 1: the weight. 2: the id. 3: too light."""
    rows = [(0, 1.0), (1, 0.7), (2, 0.8), (0, 1.0), (1, 0.9), (2, 0.8), (3, 0.59), (4, 0.6)]
    indices = np.array([(t, 5) for t, _ in rows])
    weights = np.array([(w, 1 - w) for _, w in rows])
    indices[weights == 0] = -1
    exact = np.arange(len(rows)) == 3
    matrix = ProjectionMatrix(indices, weights, exact, teacher_vocab_size=6)
    assert as_dict(TokenPairs.relaxed(matrix, 8, 6, CPU)) == {3: 0, 4: 1, 2: 2, 7: 4}


def test_a_loser_takes_the_place_of_a_winner_beyond_the_size() -> None:
    """Bug: collisions are decided before the vocabulary is cut."""
    indices, weights = np.array([[0], [0]]), np.ones((2, 1))
    matrix = ProjectionMatrix(indices, weights, np.array([False, True]), teacher_vocab_size=1)
    assert as_dict(TokenPairs.relaxed(matrix, 2, 1, CPU)) == {1: 0}
    assert as_dict(TokenPairs.relaxed(matrix, 1, 1, CPU)) == {0: 0}


MAKERS: list[Callable[[ProjectionMatrix], object]] = [
    lambda matrix: TokenPairs.exact(matrix, 9, 9, CPU),
    lambda matrix: TokenPairs.relaxed(matrix, 9, 9, CPU),
    lambda matrix: SparseProjection.of(matrix, 9, 9, CPU),
    lambda matrix: SparseProjection.of(matrix, 9, 8, CPU),
    lambda matrix: CommonCells.of(matrix.student_shared_prefix, matrix.teacher_shared_prefix, 9, 9, CPU),
]


def test_maps_are_made_once_as_long_as_the_matrix_lives() -> None:
    """Catches cached maps of a deleted matrix, used for a new one at its address."""

    def matrix() -> ProjectionMatrix:
        tokens = np.arange(9)
        shared = {"student_shared_prefix": tokens.copy(), "teacher_shared_prefix": tokens.copy()}
        return ProjectionMatrix(tokens[:, None], np.ones((9, 1)), np.ones(9, bool), teacher_vocab_size=9, **shared)

    first = matrix()
    maps = [make(first) for make in MAKERS]
    assert all(make(first) is saved for make, saved in zip(MAKERS, maps, strict=True))
    assert len({id(saved) for saved in maps}) == len(MAKERS)
    second = matrix()
    del first
    assert all(make(second) is not saved for make, saved in zip(MAKERS, maps, strict=True))
