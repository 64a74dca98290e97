"""Two ranks with half the vocabulary, or half the units, each give the loss and the gradient of one rank alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.logits import Head, HeadLogits
from nemo_opd.logits.rows import TensorLogits
from nemo_opd.logits.sources import ContextParallelLogits
from nemo_opd.losses import sampled_chunk_kl, sampled_kl
from nemo_opd.types import LossOutput
from tests.models.world import on_ranks
from tests.vocab_parallel import vocab_parallel

from .cases import LOSSES, Batch, Case, random_logits

pytestmark = pytest.mark.world

RANKS = 2
ENGINE = random_logits(2, 2, 9, 11, 0.7) - 3


def weighed(loss: Callable[..., LossOutput], positions: int) -> Case:
    """With weights of sequences, which take a reading of their own before the loss."""
    options = {"importance_level": "sequence", "importance_cap": 1.5, "importance_veto": 1e-9}
    engine = dict(zip(("logprobs", "behaviour_logprobs"), ENGINE[..., :positions], strict=True))
    return Case(f"{loss.__name__}-weighed", loss, {**options, **engine}, needs_projection=False)


CASES = [*LOSSES, weighed(sampled_kl, 7), weighed(sampled_chunk_kl, 9)]
KINDS = ("logits", "logits of both sides", "padded logits", "heads", "context")


def cut(width: int, rank: int) -> slice:
    """Uneven: 2/3 of the columns, and the others."""
    first = -(-2 * width // 3)
    return slice(0, first) if rank == 0 else slice(first, width)


def shard(logits: Tensor, rank: int) -> Tensor:
    return logits[..., cut(logits.shape[-1], rank)].clone().requires_grad_()


def found_with(kind: str, case: Case, batch: Batch, rank: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The sharded loss, its gradients, and those that the whole loss has in the same places."""
    group = dist.group.WORLD
    assert group is not None
    sizes = {"student_vocab_size": batch.student.shape[2], "teacher_vocab_size": batch.teacher.shape[2]}
    if kind == "heads":
        return _with_heads(case, batch, rank, sizes)
    if kind == "context":
        return _with_a_share_of_the_units(case, batch, sizes)
    if kind == "padded logits":
        batch = batch.widened(17, 4)
    student, teacher = shard(batch.student, rank), batch.teacher
    if kind == "logits of both sides":
        teacher = vocab_parallel(TensorLogits(shard(batch.teacher, rank).detach()), group)
    sources = batch.with_logits(vocab_parallel(TensorLogits(student), group), teacher)
    loss = case.run(sources, chunk_size=2, **sizes).loss
    _, whole = case.value_and_gradient(batch, **sizes)
    return loss.detach(), [torch.autograd.grad(loss, student)[0]], [whole[..., cut(whole.shape[-1], rank)]]


def _with_heads(
    case: Case, batch: Batch, rank: int, sizes: dict[str, int]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    group = dist.group.WORLD
    assert group is not None
    hidden = random_logits(*batch.student.shape[:2], 4, 7, 1.0).requires_grad_()
    weight = random_logits(1, batch.student.shape[2], 4, 8, 1.0)[0]
    options: dict[str, Any] = {"scale": 0.5, "soft_cap": 3.0}
    own = weight[cut(len(weight), rank)].clone().requires_grad_()
    sources = batch.with_logits(vocab_parallel(HeadLogits(hidden, Head(own, **options)), group))
    loss = case.run(sources, **sizes).loss
    whole_weight = weight.clone().requires_grad_()
    whole = case.run(batch.with_logits(HeadLogits(hidden, Head(whole_weight, **options))), **sizes).loss
    wanted = torch.autograd.grad(whole, [hidden, whole_weight])
    found = torch.autograd.grad(loss, [hidden, own])
    return loss.detach(), list(found), [wanted[0], wanted[1][cut(len(weight), rank)]]


def _with_a_share_of_the_units(
    case: Case, batch: Batch, sizes: dict[str, int]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The gradients are each rank's share, and add up."""
    group = dist.group.WORLD
    assert group is not None
    hidden = random_logits(*batch.student.shape[:2], 4, 7, 1.0).requires_grad_()
    weight = random_logits(1, batch.student.shape[2], 4, 8, 1.0)[0].requires_grad_()
    source = HeadLogits(hidden, Head(weight))
    loss = case.run(batch.with_logits(ContextParallelLogits(source, group)), **sizes).loss
    whole = case.run(batch.with_logits(source), **sizes).loss
    found = torch.autograd.grad(loss, [hidden, weight])
    for share in found:
        dist.all_reduce(share)
    return loss.detach(), list(found), list(torch.autograd.grad(whole, [hidden, weight]))


def metric_with(case: Case, batch: Batch, rank: int) -> tuple[float, float]:
    """With the sharded loss, and with the whole one."""
    group = dist.group.WORLD
    assert group is not None
    sizes = {"student_vocab_size": batch.student.shape[2], "teacher_vocab_size": batch.teacher.shape[2]}
    sharded = batch.with_logits(vocab_parallel(TensorLogits(shard(batch.student, rank)), group))
    found, whole = (case.run(own, chunk_size=2, **sizes).metrics["kd"] for own in (sharded, batch))
    return found.value(), whole.value()


def largest_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)) if wanted.numel() else 0.0


def errors_on_rank(kinds: tuple[str, ...]) -> dict[str, float]:
    rank, errors = dist.get_rank(), {}
    for case in CASES:
        found, wanted = metric_with(case, case.batch(), rank)
        errors[f"{case}/metric"] = abs(found - wanted) / abs(wanted)
        for kind in kinds:
            batch = case.batch()
            loss, found, wanted = found_with(kind, case, batch, rank)
            whole, _ = case.value_and_gradient(batch)
            error = 0.0 if kind in ("heads", "context") else largest_error(loss, whole)
            errors[f"{case}/{kind}"] = max(error, *map(largest_error, found, wanted))
            nothing, _, _ = found_with(kind, case, batch.without_chunks(), rank)
            errors[f"{case}/{kind}/no units"] = float(nothing)
    return errors


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict[str, float]]:
    return on_ranks(RANKS, errors_on_rank, KINDS, tmp_path_factory.mktemp("vocab_parallel"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_and_gradient(errors, case, kind):
    """Relative to the largest entry, in float64."""
    for of_rank in errors:
        assert of_rank[f"{case}/{kind}"] < 1e-11
        assert of_rank[f"{case}/{kind}/no units"] == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_metric(errors, case):
    """Some are read off the units by the rank that computes them, and are to be brought together."""
    for of_rank in errors:
        assert of_rank[f"{case}/metric"] < 1e-11
