"""What a teacher hands over is what transformers computes, in bf16, and nothing of it is padding of the head."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_opd.handoff.base import Handle
from nemo_opd.handoff.shared_memory import SharedMemoryReceiver
from nemo_opd.training.plan import Plan
from nemo_opd.types import Batch
from tests.tiny import Tiny
from tests.workers.local import LocalModels, first_batches, in_world, plan_of


@dataclass(frozen=True)
class Scoring:
    plan: Plan
    batches: list[Batch]


@dataclass(frozen=True)
class Scored:
    """By batch and teacher."""

    handles: list[tuple[Handle, ...]]
    logits: list[list[Tensor]]


def score(job: Scoring) -> Scored:
    models = LocalModels(job.plan)
    handles, logits = [], []
    with SharedMemoryReceiver() as receiver:
        for batch in job.batches:
            handles.append(models.score(models.own(batch)))
            logits.append([receiver.tensor(handle).clone() for handle in handles[-1]])
    models.close()
    return Scored(handles, logits)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def scoring(request: pytest.FixtureRequest, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory):
    plan = plan_of(tiny.overrides("train.micro_batch_size=2", f"teachers.0.dtype={request.param}"))
    batches = first_batches(plan, 3)
    (scored,) = in_world(1, score, [Scoring(plan, batches)], tmp_path_factory.mktemp("teacher"))
    return plan, batches, scored


@pytest.mark.parametrize("teacher", [0, 1])
def test_logits_are_those_of_transformers(scoring, teacher: int) -> None:
    """One sequence at a time and unpadded. fp32: the two may round to neighbouring bf16 numbers, 2⁻⁸ apart, where
    they differ in the last bits. bf16: each layer rounds to 2⁻⁸ and a batch may group sums otherwise, some roundings
    of the largest logit altogether. Bugs: rows or positions of another microbatch, padding attended to."""
    plan, batches, scored = scoring
    settings = plan.config.teachers[teacher]
    dtype = getattr(torch, settings.dtype)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()
    for batch, logits in zip(batches, scored.logits, strict=True):
        rows = batch.teachers[teacher].tokens
        for row, length in enumerate(rows.lengths.tolist()):
            with torch.no_grad():
                expected = model(rows.ids[row : row + 1, :length]).logits[0].float()
            expected = expected[:, : plan.teachers[teacher].vocab_size]
            atol = 1e-5 if dtype == torch.float32 else 4 * 2**-8 * float(expected.abs().max())
            torch.testing.assert_close(logits[teacher][row, :length].float(), expected, rtol=2**-8, atol=atol)


def test_columns_beyond_the_tokenizer_are_not_handed_over(scoring, tiny: Tiny) -> None:
    """The cross-tokenizer teacher's head is 20 wider than its tokenizer."""
    _, batches, scored = scoring
    size = len(AutoTokenizer.from_pretrained(tiny.teacher_cross))
    assert AutoModelForCausalLM.from_pretrained(tiny.teacher_cross).config.vocab_size == size + 20
    for batch, handles in zip(batches, scored.handles, strict=True):
        rows = batch.teachers[0].tokens.ids
        assert handles[0].shape == (*rows.shape, size)
        assert handles[0].dtype == torch.bfloat16


def test_buffer_persists_across_steps(scoring) -> None:
    """Bug: memory that is mapped anew in every step. A larger batch is a new allocation, a smaller one is not."""
    _, _, scored = scoring
    for teacher in (0, 1):
        allocations = [handles[teacher].allocation for handles in scored.handles]
        sizes = [handles[teacher].num_bytes for handles in scored.handles]
        growths = sum(size > max(sizes[:i], default=0) for i, size in enumerate(sizes))
        assert allocations[-1] == growths
        assert len({handles[teacher].sender for handles in scored.handles}) == 1
