"""Every loss with cross-entropy, a second teacher and a metric, on three ranks with uneven blocks.

Units with several student tokens overlap, so no cut suits all terms. A budget of few rows makes many blocks; some have
no unit of a term, and ranks have different numbers of steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.logits import (
    AveragedLogits,
    Head,
    HeadLogits,
    TensorLogits,
    blocks,
    compute_together,
)
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.rows import LogitRows, TrainableRows
from nemo_opd.logits.sources import ContextParallelLogits
from nemo_opd.losses import alm, cross_entropy, gold, h_kl, p_kl, sampled_chunk_kl, sampled_kl, uld
from nemo_opd.losses.logit_metrics import plan_overlap
from tests.models.world import on_ranks
from tests.vocab_parallel import vocab_parallel

from .cases import ALL_LOSSES, Batch, Case, identity, random_logits

pytestmark = pytest.mark.world

RANKS, TEXTS, LENGTH, WIDTH, HIDDEN = 3, 2, 23, 8, 4
ROWS, SIZES = WIDTH + 3, {"student_vocab_size": WIDTH, "teacher_vocab_size": WIDTH}
"""Rows of a head. The last ones are not tokens, and the last rank has only these."""
BUDGET, SMALL_BUDGET, UNCUT = 40 * WIDTH * 8, 2 * WIDTH * 8, 2**30
KINDS = ("heads of both sides", "logits", "context")
INTERLEAVED = ("heads", *KINDS)
MORE_KINDS = ("heads", "logits of both sides", "averaged heads of both sides")
LOGPROBS = torch.full((TEXTS, LENGTH), -2.0)
WEIGHED = {"importance_level": "sequence", "importance_cap": 1.5, "importance_veto": 1e-9}
"""With weights of sequences, which read the logits once more before the loss."""
CASES = [
    *ALL_LOSSES,
    Case("p_kl-nemo_rl", p_kl, {"compat": "nemo_rl", "vocab_topk": 5}),
    Case("gold-trl", gold, {"compat": "trl"}),
    Case("h_kl-nemo_rl", h_kl, {"compat": "nemo_rl"}),
    Case("uld-trl", uld, {"compat": "trl"}, needs_projection=False),
    *(
        Case(f"{loss.__name__}-weighed", loss, {"logprobs": LOGPROBS, **WEIGHED}, needs_projection=False)
        for loss in (sampled_kl, sampled_chunk_kl)
    ),
]


RUNS = [
    (case, kind)
    for case in CASES
    for kind in (*KINDS, *(MORE_KINDS if case.name in ("alm", "byte_prefix", "byte_prefix-cover", "p_kl-mean") else ()))
]


def chunks(longest: int, seed: int) -> Tensor:
    """[TEXTS, LENGTH]: chunks of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (TEXTS, LENGTH), generator=generator)
    return torch.stack([torch.arange(LENGTH).repeat_interleave(chunk_lengths)[:LENGTH] for chunk_lengths in lengths])


IDS = torch.randint(0, WIDTH, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(0))
MASK = torch.rand(TEXTS, LENGTH, generator=torch.Generator().manual_seed(1)) < torch.linspace(1.2, 0, LENGTH)
HIDDENS = [random_logits(TEXTS, LENGTH, HIDDEN, seed, 1.0) for seed in range(3)]
"""Hidden states of the student and two teachers."""
WEIGHTS = [random_logits(1, ROWS, HIDDEN, seed, 1.5)[0] for seed in range(3, 6)]


def plans(case: Case, student: TrainableRows, teachers: Sequence[LogitRows]) -> list[PlannedLoss]:
    chunk_ids, alm_chunk_ids = chunks(3, 2), chunks(5, 3)
    batch = Batch(torch.empty(0), torch.empty(0), IDS, IDS, chunk_ids, chunk_ids, identity(WIDTH))
    arguments = case.arguments(batch)
    if "mask" in arguments:
        arguments["mask"] = MASK
    ids = dict.fromkeys(("student_ids", "teacher_ids"), IDS)
    alm_chunks = dict.fromkeys(("student_chunk_id", "teacher_chunk_id"), alm_chunk_ids)
    everywhere = torch.ones_like(IDS)
    return [
        cross_entropy.plan(student, IDS, mask=everywhere, vocab_size=WIDTH),
        case.loss.plan(student, teachers[0], **arguments, **case.options, **SIZES),
        alm.plan(student, teachers[1], **ids, **alm_chunks, **SIZES).times(0.7),
        plan_overlap(student, teachers[0], mask=MASK, top_k=2, **SIZES),
    ]


def interleaved(student: TrainableRows, teachers: Sequence[LogitRows]) -> list[PlannedLoss]:
    """Plan pairs of tokens for two teachers, shifted by one token, so no row ends a pair of both."""
    planned = []
    for first, teacher in enumerate(teachers):
        ids = ((torch.arange(LENGTH) + first) // 2).expand(TEXTS, LENGTH)
        sides = {"student_ids": IDS, "teacher_ids": IDS, "student_chunk_id": ids, "teacher_chunk_id": ids}
        planned.append(alm.plan(student, teacher, **sides, **SIZES))
    return planned


Plan = Callable[[TrainableRows, Sequence[LogitRows]], list[PlannedLoss]]
Sources = tuple[TrainableRows, list[LogitRows], list[Tensor]]
"""Student, teachers, and the student's leaves."""


def build_sources(kind: str, shard: slice, lay_out: Callable[[TensorLogits | HeadLogits], TrainableRows]) -> Sources:
    """Make them with these columns of each vocabulary, laid out over ranks."""
    weights = [weight[shard].clone() for weight in WEIGHTS]
    leaf = weights[0].requires_grad_()
    if "logits" in kind:
        logits = [hidden @ weight.detach().t() for hidden, weight in zip(HIDDENS, weights, strict=True)]
        local: list[TensorLogits | HeadLogits] = [
            TensorLogits(logits[0].requires_grad_()),
            *map(TensorLogits, logits[1:]),
        ]
    else:
        hiddens = [HIDDENS[0].clone().requires_grad_(), *HIDDENS[1:]]
        local = [HeadLogits(hidden, Head(weight)) for hidden, weight in zip(hiddens, weights, strict=True)]
    replicated = [HeadLogits(hidden, Head(weight)) for hidden, weight in zip(HIDDENS[1:], WEIGHTS[1:], strict=True)]
    teachers: list[LogitRows] = [lay_out(source) for source in local[1:]] if "both" in kind else list(replicated)
    if "averaged" in kind:
        teachers[0] = AveragedLogits([replicated[1], teachers[0]], [0.3, 0.7])
    return lay_out(local[0]), teachers, list(local[0].leaves) if "logits" in kind else [local[0].leaves[0], leaf]


def largest_difference(plan: Plan, kind: str, rank: int, budget: int = BUDGET) -> float:
    """Compare loss, gradients and metrics with a single rank's, relative to the largest entry."""
    group = dist.group.WORLD
    assert group is not None
    cuts = [0, 5, WIDTH, ROWS]
    shard = slice(0, ROWS) if kind == "context" else slice(cuts[rank], cuts[rank + 1])
    student, teachers, leaves = build_sources(
        kind,
        shard,
        lambda local: ContextParallelLogits(local, group) if kind == "context" else vocab_parallel(local, group),
    )
    blocks.CPU_BLOCK_BYTES, blocks.CPU_PRODUCT_ROWS = budget, 1
    out = compute_together(plan(student, teachers))
    gradients = list(torch.autograd.grad(out.loss, leaves))
    if kind == "context":
        for gradient in gradients:
            dist.all_reduce(gradient)
    student, teachers, leaves = build_sources(kind, slice(0, ROWS), lambda local: local)
    blocks.CPU_BLOCK_BYTES = UNCUT
    alone = compute_together(plan(student, teachers))
    expected = list(torch.autograd.grad(alone.loss, leaves))
    expected = [expected[0][..., shard]] if "logits" in kind else [expected[0], expected[1][shard]]
    values = [torch.tensor([metric.value() for metric in output.metrics.values()]) for output in (out, alone)]
    return max(
        map(largest_error, [out.loss.detach(), values[0], *gradients], [alone.loss.detach(), values[1], *expected])
    )


def largest_error(computed: Tensor, expected: Tensor) -> float:
    return float((computed - expected).abs().max() / expected.abs().max().clamp(min=1e-30)) if expected.numel() else 0.0


def without_chunks(case: Case) -> Case:
    """Return the case with a batch that has no units for it."""
    loss = case.loss

    class Nothing:
        @staticmethod
        def plan(*sources: LogitRows, **arguments: Tensor) -> PlannedLoss:
            none = {name: torch.full_like(IDS, -1) for name in ("student_chunk_id", "teacher_chunk_id")}
            return loss.plan(*sources, **{**arguments, **none})

    return replace(case, loss=Nothing)


def errors_on_rank(interleaved_kinds: tuple[str, ...]) -> dict[str, float]:
    rank = dist.get_rank()
    errors = {f"{case}/{kind}": largest_difference(partial(plans, case), kind, rank) for case, kind in RUNS}
    for kind in interleaved_kinds:
        errors[f"interleaved/{kind}"] = largest_difference(interleaved, kind, rank, SMALL_BUDGET)
    for case in CASES:
        if case.name in ("p_kl", "byte_prefix", "alm"):
            nothing = largest_difference(partial(plans, without_chunks(case)), "heads of both sides", rank)
            errors[f"{case}/heads of both sides"] = max(errors[f"{case}/heads of both sides"], nothing)
    return errors


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return on_ranks(RANKS, errors_on_rank, INTERLEAVED, tmp_path_factory.mktemp("parallel_joint"))


@pytest.mark.parametrize(("case", "kind"), RUNS, ids=str)
def test_joint_losses_equal_one_rank(errors: list[dict[str, float]], case: Case, kind: str) -> None:
    """float64; only the order of sums differs. Bugs: a gradient lost if blocks of two ranks share a row; ranks that
    read a sharded teacher different numbers of times.
    """
    for rank_errors in errors:
        assert rank_errors[f"{case}/{kind}"] < 1e-11


@pytest.mark.parametrize("kind", INTERLEAVED)
def test_interleaved_units_equal_one_rank(errors: list[dict[str, float]], kind: str) -> None:
    """Blocks share rows, also blocks that ranks compute at the same time. Bug: a gradient overwritten by the next
    block.
    """
    for rank_errors in errors:
        assert rank_errors[f"interleaved/{kind}"] < 1e-11
