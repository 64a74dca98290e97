"""A teacher's logits in several buffers, each with some of the columns, are read like one tensor."""

from dataclasses import replace

import pytest
import torch

from nemo_opd.logits.rows import TensorLogits
from nemo_opd.logits.sources import SideBySideLogits
from tests.losses.cases import LOSSES, Case


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_every_loss_reads_shards_of_the_teacher(case: Case) -> None:
    """Catches a wrong loss or gradient with uneven shards, the last beyond the vocabulary, and several chunks."""
    batch = case.batch()
    student = batch.student.detach().requires_grad_()
    size = batch.teacher.shape[2]
    padded = torch.cat([batch.teacher, torch.full_like(batch.teacher[..., :2], 99.0)], 2)
    shards = [TensorLogits(shard) for shard in padded.split([1, size - 2, 1, 2], 2)]

    expected = case.run(replace(batch, student=student, teacher=padded), teacher_vocab_size=size, chunk_size=2)
    from_shards = case.run(
        replace(batch, student=student, teacher=SideBySideLogits(shards)), teacher_vocab_size=size, chunk_size=2
    )

    assert torch.equal(from_shards.loss, expected.loss)
    assert torch.equal(*(torch.autograd.grad(output.loss, student)[0] for output in (from_shards, expected)))
