"""A teacher's output and greedy answers equal those of transformers, without the padding of the head."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_opd.distributed.layout import Layout, Place
from nemo_opd.handoff.outputs import HiddenStatesHandle, OutputHandle, windows
from nemo_opd.handoff.shared_memory import SharedMemoryReceiver
from nemo_opd.handoff.slices import LayoutPair
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.sources import PackedLogits
from nemo_opd.preflight.plan import Plan
from nemo_opd.rollout.engine_interface import BatchLimit, Completion, Request, Sampling
from nemo_opd.training.groups import column_order
from nemo_opd.types import TokenRows
from nemo_opd.workers.teacher_worker import TeacherWorker
from tests.tiny import Tiny
from tests.workers.local import Training, first_batches, in_world, on_ranks_of, opened, plan_of, rank_zero

pytestmark = pytest.mark.world
ALONE = LayoutPair(Layout(1), Layout(1), (Place(0, 0),), (Place(0, 0),))


@dataclass(frozen=True)
class Scored:
    """Results for each batch and teacher."""

    handles: list[tuple[OutputHandle, ...]]
    logits: list[list[Tensor]]
    dtypes: list[list[torch.dtype]]


def score(job: Training) -> Scored:
    sizes = [teacher.vocab_size for teacher in job.plan.teachers]
    handles, logits, dtypes = [], [], []
    with opened(job.plan) as models, SharedMemoryReceiver() as receiver:
        for batch in job.batches:
            handles.append(
                tuple(
                    on_ranks_of(group, forward, rows.tokens)[0]
                    for group, rows in zip(models.teachers, batch.teachers, strict=True)
                )
            )
            outputs = [
                windows([handle], ALONE, rows.tokens.packed_lengths)[0].rows(
                    receiver, slice(None), rows.tokens.ids.shape[1]
                )
                for handle, rows in zip(handles[-1], batch.teachers, strict=True)
            ]
            logits.append([all_logits(rows, size) for rows, size in zip(outputs, sizes, strict=True)])
            dtypes.append([rows.leaves[0].dtype for rows in outputs if isinstance(rows, PackedLogits)])
    return Scored(handles, logits, dtypes)


def forward(teacher: TeacherWorker, tokens: TokenRows) -> OutputHandle:
    return teacher.forward(tokens, in_twos(tokens)).handle


def in_twos(tokens: TokenRows) -> list[slice]:
    return [slice(start, start + 2) for start in range(0, len(tokens), 2)]


def all_logits(rows: LogitRows, size: int) -> Tensor:
    """Return all logits [B, T, W]."""
    assert rows.shape[2] == size
    return rows.read(torch.arange(rows.shape[0] * rows.shape[1]), size).view(rows.shape).clone()


GIVEN = [(dtype, handoff) for dtype in ("float32", "bfloat16") for handoff in ("hidden_states", "logits")]


@pytest.fixture(scope="module", params=GIVEN, ids="-".join)
def scoring(request: pytest.FixtureRequest, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory):
    dtype, handoff = request.param
    options = ("train.micro_batch_size=2", f"teachers.0.dtype={dtype}", f"handoff={handoff}")
    plan = plan_of(tiny.overrides(*options))
    batches = first_batches(plan, 3)
    (scored,) = in_world(1, score, [Training(plan, batches)], tmp_path_factory.mktemp("teacher"))
    return plan, batches, scored


@pytest.mark.parametrize("teacher", [0, 1])
def test_logits_equal_those_of_transformers(scoring, teacher: int) -> None:
    """Bugs: rows or positions of another microbatch; attention to padding.

    Tolerance: a batch may group sums differently, and in bf16 each layer rounds to 2⁻⁸, in all about four roundings of
    the largest logit.
    """
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
            if (order := column_order(plan, teacher)) is not None:
                expected = expected[:, order]
            eps = 1e-6 if dtype == torch.float32 else 2**-8
            atol = 4 * eps * float(expected.abs().max())
            torch.testing.assert_close(logits[teacher][row, :length].float(), expected, rtol=eps, atol=atol)


def test_columns_beyond_the_tokenizer_are_not_handed_over(scoring, tiny: Tiny) -> None:
    """The cross-tokenizer teacher's head has 20 rows more than its tokenizer has tokens."""
    _, batches, scored = scoring
    size = len(AutoTokenizer.from_pretrained(tiny.teacher_cross))
    assert AutoModelForCausalLM.from_pretrained(tiny.teacher_cross).config.vocab_size == size + 20
    for batch, logits in zip(batches, scored.logits, strict=True):
        assert logits[0].shape == (*batch.teachers[0].tokens.ids.shape, size)


def test_output_has_the_teachers_dtype(scoring) -> None:
    plan, _, scored = scoring
    for dtypes in scored.dtypes:
        assert dtypes == [getattr(torch, teacher.dtype) for teacher in plan.config.teachers]


def test_buffer_persists_across_steps(scoring) -> None:
    """Bug: memory is mapped again in every step. A larger batch is a new allocation, a smaller one is not."""
    _, _, scored = scoring
    for teacher in (0, 1):
        handles = [of_batch[teacher].output for of_batch in scored.handles]
        sizes = [handle.num_bytes for handle in handles]
        growths = sum(size > max(sizes[:i], default=0) for i, size in enumerate(sizes))
        assert handles[-1].allocation == growths
        assert len({handle.sender for handle in handles}) == 1


def test_the_head_is_handed_over_once(scoring) -> None:
    """Bug: gigabytes copied in every step."""
    _, _, scored = scoring
    for teacher in (0, 1):
        of_batches = [handles[teacher] for handles in scored.handles]
        heads = {handle.head.weight for handle in of_batches if isinstance(handle, HiddenStatesHandle)}
        assert len(heads) <= 1
        assert all(handle.allocation == 1 for handle in heads)


@dataclass(frozen=True)
class Asking:
    plan: Plan
    requests: list[Request]
    ends: frozenset[int]
    tokens: TokenRows


@dataclass(frozen=True)
class Said:
    completions: list[Completion]
    quality: tuple[float, float]
    """Nats of texts before and after generation."""


def ask(job: Asking) -> Said:
    worker = TeacherWorker(
        job.plan.config.teachers[0],
        key="teachers.0.model",
        vocab_size=job.plan.teachers[0].vocab_size,
        device="cpu",
        transport="shared_memory",
        handoff="hidden_states",
    )
    initial = worker.token_nats(job.tokens, in_twos(job.tokens)).sum()
    completions = worker.generate(job.requests, Sampling(temperature=0), job.ends, BatchLimit(2))
    quality = (float(initial), float(worker.token_nats(job.tokens, in_twos(job.tokens)).sum()))
    worker.close()
    return Said(completions, quality)


CUT = ("{tp: 1}", "{tp: 2, sequence_parallel: true}")
"""Parallelism over two ranks: sharded, or tensor parallel with sequence parallelism."""
NEW = 12


def test_greedy_answers_equal_those_of_transformers(tiny: Tiny, tmp_path) -> None:
    """Greedy tokens of the teacher's tokenizer. Bugs: ids in the head's padding; the student's end tokens; attention to
    padding before prompts; a model that generation has changed."""
    options = ("cluster.cpu_ranks=2", "teachers.0.dtype=float32")
    plans = [plan_of(tiny.overrides(*options, f"teachers.0.parallelism={cut}")) for cut in CUT]
    tokenizer = AutoTokenizer.from_pretrained(tiny.teacher_cross)
    prompts = [tokenizer(text)["input_ids"] for text in ("The quick", "for i in range(1000):", "Größe")]
    free = [likeliest(tiny, ids, []) for ids in prompts]
    ends = frozenset({free[0][3]})
    requests = [Request(np.array(ids, np.int32), NEW, seed=0) for ids in prompts]
    tokens = first_batches(plans[0], 1)[0].teachers[0].tokens

    answers = rank_zero(2, ask, [Asking(plan, requests, ends, tokens) for plan in plans], tmp_path / "world")

    assert max(map(max, free)) < len(tokenizer)
    for answer in answers:
        assert [completion.ids.tolist() for completion in answer.completions] == [
            likeliest(tiny, ids, [*ends]) for ids in prompts
        ]
        assert len(answer.completions[0].ids) < NEW
        assert answer.quality[0] == answer.quality[1]


def likeliest(tiny: Tiny, ids: list[int], ends: list[int]) -> list[int]:
    """Generate with transformers, without ids in the head's padding of 20 rows."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny.teacher_cross, dtype=torch.float32).eval()
    size = model.config.vocab_size
    generated = model.generate(
        torch.tensor([ids]),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=0,
        suppress_tokens=list(range(size - 20, size)),
    )
    return generated[0, len(ids) :].tolist()
