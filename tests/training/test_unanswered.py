"""Tokens that a teacher's servers have not answered are not targets."""

from dataclasses import replace

import torch
from torch import Tensor

from nemo_opd.cluster.batch_grid import BatchGrid
from nemo_opd.distributed.layout import Layout
from nemo_opd.training.models import only_answered
from nemo_opd.types import Batch, ChunkRows, MovedRows, TeacherRows, TokenRows
from nemo_opd.workers.teacher_worker import TeacherOutput

S, T = 5, 6


def tokens(width: int) -> TokenRows:
    ids = torch.arange(2 * width).view(2, width)
    return TokenRows(ids, torch.tensor([width, width - 1]), ids % width > 0, torch.ones_like(ids, dtype=torch.int32))


def outputs(is_answered: Tensor | None) -> list[TeacherOutput]:
    parts = [None] * 2 if is_answered is None else list(is_answered.split(1))
    return [TeacherOutput(None, None, 0.0, 1, is_answered=part) for part in parts]  # type: ignore[arg-type]


def without(rows: TeacherRows, *lost: tuple[int, int]) -> tuple[TeacherRows, Batch]:
    """Return teacher 0's rows without the (sequence, token) pairs `lost`, and the batch: two sequences on two ranks."""
    is_answered = torch.ones(2, rows.tokens.ids.shape[1] - 1, dtype=torch.bool)
    for sequence, token in lost:
        is_answered[sequence, token] = False
    batch = Batch(tokens(S), (rows, replace(rows)))
    grid = BatchGrid(Layout(dp=1), (Layout(dp=2), Layout(dp=2)))
    answered, numbers = only_answered(batch, [outputs(is_answered), outputs(None)], grid)
    assert numbers == [len(lost), None]
    assert answered.student is batch.student  # cross-entropy learns them
    assert answered.teachers[1] is batch.teachers[1]
    return answered.teachers[0], batch


def test_of_the_students_ids_the_token_is_not_scored() -> None:
    """Catches a mask that is shifted by one, or taken from another sequence."""
    rows = TeacherRows(tokens(S), None)
    answered, _ = without(rows, (0, 2), (1, 3))
    expected = rows.tokens.loss_mask.clone()
    expected[0, 2] = expected[1, 3] = False
    assert torch.equal(answered.tokens.loss_mask, expected)


def test_after_another_prompt_it_is_the_students_token() -> None:
    """Catches a position of the teacher used as one of the student."""
    mask = torch.ones(2, S, dtype=torch.bool)
    rows = TeacherRows(tokens(T), None, moved=MovedRows(torch.tensor([1, 0]), mask))
    answered, _ = without(rows, (0, 3), (1, 3))
    assert answered.moved is not None
    assert (~answered.moved.loss_mask).nonzero().tolist() == [[0, 2], [1, 3]]


def test_of_other_ids_it_is_the_whole_chunk_on_both_sides() -> None:
    """Catches a chunk that stays in part, and the chunk of another sequence."""
    student = torch.tensor([[-1, 0, 1, 1, 2], [-1, 0, 1, 2, 3]], dtype=torch.int32)
    teacher = torch.tensor([[-1, 0, 1, 1, 1, 2], [-1, 0, 0, 1, 2, 3]], dtype=torch.int32)
    answered, _ = without(TeacherRows(tokens(T), ChunkRows(student, teacher)), (0, 3), (1, 0))
    assert answered.chunks is not None
    assert answered.chunks.student.tolist() == [[-1, 0, -1, -1, 2], [-1, 0, 1, 2, 3]]
    assert answered.chunks.teacher.tolist() == [[-1, 0, -1, -1, -1, 2], [-1, 0, 0, 1, 2, 3]]


def test_without_a_lost_token_nothing_changes() -> None:
    """Catches a batch that is copied in every step although nothing is lost."""
    rows = TeacherRows(tokens(S), None)
    answered, batch = without(rows)
    assert answered is batch.teachers[0]
