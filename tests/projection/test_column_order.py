"""Teacher columns in the order of student tokens, and projections onto them."""

from dataclasses import fields

import numpy as np

from nemo_opd.projection import ProjectionMatrix, add_byte_prefix, add_shared_prefix, build_projection
from nemo_opd.projection.matrix import order_by_student, with_columns

from .conftest import SMALL


def test_pairs_are_in_the_order_of_the_student() -> None:
    """Student tokens 0 and 3 are exact, 4 is spelled by another token's partner, and no row reaches teacher token 2."""
    indices = [[4, -1], [1, 3], [-1, -1], [0, -1], [0, 1]]
    weights = [[1, 0], [0.5, 0.5], [0, 0], [1, 0], [0.5, 0.5]]
    exact = [True, False, False, True, False]
    matrix = ProjectionMatrix(indices, weights, exact, teacher_vocab_size=5)
    assert order_by_student(matrix, 5).tolist() == [4, 1, 3, 0, 2]
    # Ids beyond the smaller vocabulary keep their number.
    assert order_by_student(matrix, 7).tolist() == [4, 1, 3, 0, 2, 5, 6]
    order = order_by_student(matrix, 3)
    assert order.tolist() == [1, 0, 2]
    assert with_columns(matrix, order).indices.tolist() == [[4, -1], [0, 3], [-1, -1], [1, -1], [1, 0]]


def test_back_and_forth() -> None:
    """Catches an array with the old ids, and pieces that are cut at the old ends."""
    tokenizers = SMALL["three_digits"], SMALL["sentencepiece"]
    matrix = add_shared_prefix(add_byte_prefix(build_projection(*tokenizers), *tokenizers), *tokenizers)
    order = order_by_student(matrix, matrix.teacher_vocab_size)
    reordered = with_columns(matrix, order)
    assert not np.array_equal(reordered.indices, matrix.indices)
    assert (np.diff(reordered.shared_pairs[:, 1]) > 0).all()
    back = with_columns(reordered, np.argsort(order))
    for field in fields(matrix):
        name, expected = field.name, getattr(matrix, field.name)
        assert expected is not None, name
        np.testing.assert_array_equal(getattr(back, name), expected, err_msg=name)
        if isinstance(expected, np.ndarray):
            is_by_teacher = name.startswith("teacher") or name in ("indices", "byte_prefix")
            assert np.array_equal(getattr(reordered, name), expected) != is_by_teacher, name
