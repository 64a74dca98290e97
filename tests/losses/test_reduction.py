import numpy as np
import pytest
import torch

from nemo_opd.errors import ConfigError
from nemo_opd.losses.arguments import chunk_starts, chunk_units, count_label_tokens, label_rows

from .cases import random_chunk_ids
from .plain import compared_chunks


def test_label_rows_are_the_predictors():
    """Row i−1 predicts token i, and no row predicts token 0. Bug: a shift by another number."""
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    assert label_rows(mask).tolist() == [1, 2, 4]
    assert count_label_tokens(mask).sum() == 3


@pytest.mark.parametrize("seed", range(8))
def test_units_equal_the_loop(seed):
    """Bug: a chunk's first row or its length, with gaps and tokens without a chunk."""
    student, teacher = random_chunk_ids(np.random.default_rng(seed), 4, 17, 12)
    expected = compared_chunks(student, teacher)
    units = chunk_units(student, teacher)
    assert units.student_rows.tolist() == [b * 17 + ours[0] - 1 for b, ours, _ in expected]
    assert units.teacher_rows.tolist() == [b * 12 + theirs[0] - 1 for b, _, theirs in expected]
    assert chunk_starts(student, teacher)[0].sum() == len(expected)
    assert len(units) == len(expected)
    assert units.student_lengths.tolist() == [len(ours) for _, ours, _ in expected]
    assert units.teacher_lengths.tolist() == [len(theirs) for _, _, theirs in expected]


def test_selected_units():
    """Bug: rows are selected and their lengths are not."""
    student, teacher = random_chunk_ids(np.random.default_rng(0), 4, 17, 12)
    units = chunk_units(student, teacher)
    one_to_one = (units.student_lengths == 1) & (units.teacher_lengths == 1)
    selected = units.where(one_to_one)
    chunks = compared_chunks(student, teacher)
    expected = [b * 17 + ours[0] - 1 for b, ours, theirs in chunks if len(ours) == len(theirs) == 1]
    assert selected.student_rows.tolist() == expected
    assert 0 < len(selected) < len(units)
    assert selected.student_lengths.eq(1).all()
    assert len(selected.teacher_rows) == len(selected.teacher_lengths) == len(selected)


def test_chunks_on_one_side_only_or_at_token_0_are_not_units():
    """Truncation leaves a chunk on one side; token 0 has no predictor. Bug: such a chunk is compared."""
    student = torch.tensor([[0, 1, 1, 2, -1, 4], [-1, 0, 1, 2, -1, -1]])
    teacher = torch.tensor([[-1, 0, 1, 3, 4], [0, 1, 2, 2, 5]])
    chunks = [(0, [1, 2], [2]), (0, [5], [4]), (1, [2], [1]), (1, [3], [2, 3])]
    assert compared_chunks(student, teacher) == chunks
    units = chunk_units(student, teacher)
    assert units.student_rows.tolist() == [0, 4, 7, 8]
    assert units.teacher_rows.tolist() == [1, 3, 5, 6]
    assert units.student_lengths.tolist() == [2, 1, 1, 1]
    assert units.teacher_lengths.tolist() == [1, 1, 1, 2]
    assert chunk_starts(student, teacher)[0].sum() == 4


def test_a_gap_does_not_begin_a_chunk_again():
    """Bug: a chunk with a gap counts twice."""
    units = chunk_units(torch.tensor([[-1, 3, -1, 3]]), torch.tensor([[-1, 3, 3]]))
    assert units.student_rows.tolist() == [0]


def test_batches_of_different_length_are_refused():
    with pytest.raises(ConfigError, match="student 2, teacher 3"):
        chunk_starts(torch.zeros(2, 4), torch.zeros(3, 4))
