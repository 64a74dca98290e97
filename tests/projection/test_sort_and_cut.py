"""Sorting, cutting and normalising rows."""

import numpy as np
import pytest

from nemo_opd.errors import ProjectionError
from nemo_opd.projection import ProjectionMatrix, sort_and_cut


def test_rows_are_sorted_cut_and_of_sum_1() -> None:
    """Catches holes within a row, reordered equal weights, filled empty rows, and exact rows that are not exactly 1."""
    indices = [[7, -1, 3, 5], [9, 8, -1, 2], [-1, -1, -1, -1], [-1, -1, 4, -1]]
    weights = [[0.125, 0, 0.625, 0.25], [0.25, 0.25, 0, 0.5], [0, 0, 0, 0], [0, 0, 1, 0]]
    matrix = ProjectionMatrix(indices, weights, np.array([False, False, False, True]), teacher_vocab_size=10)
    cut = sort_and_cut(matrix, 2)
    assert cut.indices.tolist() == [[3, 5], [2, 9], [-1, -1], [4, -1]]
    expected = [[0.625 / 0.875, 0.25 / 0.875], [0.5 / 0.75, 0.25 / 0.75], [0, 0], [1, 0]]
    assert cut.weights == pytest.approx(np.array(expected), rel=2**-23)
    assert (cut.exact.tolist(), cut.options.passes, cut.options.top_k) == (matrix.exact.tolist(), ("sort_and_cut",), 2)


def test_a_wider_matrix_has_empty_columns() -> None:
    """Bug: the width follows the rows and not top_k."""
    cut = sort_and_cut(ProjectionMatrix([[2, 1]], [[0.25, 0.75]]), 4)
    assert cut.indices.tolist() == [[1, 2, -1, -1]]
    assert cut.weights.tolist() == [[0.75, 0.25, 0, 0]]


def test_an_entry_without_weight_goes_before_an_empty_one() -> None:
    cut = sort_and_cut(ProjectionMatrix([[-1, 3, 1]], [[0, 0, 1.0]]), 3)
    assert cut.indices.tolist() == [[1, 3, -1]]


def test_a_row_needs_room() -> None:
    with pytest.raises(ProjectionError, match="top_k is 0"):
        sort_and_cut(ProjectionMatrix([[0]], [[1.0]]), 0)
