"""A teacher whose columns are in several buffers is read like one whose columns are in one."""

from dataclasses import replace

import pytest
import torch

from nemo_opd.logits.rows import TensorLogits
from nemo_opd.logits.sources import SideBySideLogits
from tests.losses.cases import LOSSES, Case


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_every_loss_reads_shards_of_the_teacher(case: Case) -> None:
    """Uneven shards, the last beyond the vocabulary, over several chunks: the loss and the student's gradient."""
    batch = case.batch()
    student = batch.student.detach().requires_grad_()
    size = batch.teacher.shape[2]
    padded = torch.cat([batch.teacher, torch.full_like(batch.teacher[..., :2], 99.0)], 2)
    shards = [TensorLogits(shard) for shard in padded.split([1, size - 2, 1, 2], 2)]

    whole = case.run(replace(batch, student=student, teacher=padded), teacher_vocab_size=size, chunk_size=2)
    read = case.run(
        replace(batch, student=student, teacher=SideBySideLogits(shards)), teacher_vocab_size=size, chunk_size=2
    )

    assert torch.equal(read.loss, whole.loss)
    assert torch.equal(*(torch.autograd.grad(output.loss, student)[0] for output in (read, whole)))
