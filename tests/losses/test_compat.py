"""Presets against the formulas of the systems they are named after."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_opd.losses import gold, h_kl, p_kl, uld
from tests.reference import losses as reference

from . import cases
from .cases import STUDENT, TEACHER, Batch, pair, two_tokenizers
from .plain import plain_maps, plain_texts

TAU = 1.7
KINDS = [kind for kind in cases.KINDS if kind[0] != "tvd"]
Pairs = tuple[list[int], list[int]]
PAIRS: dict[Callable[..., Any], Pairs] = {
    loss: reference.pairs_of(plain_maps(pair(), TEACHER), min_weight)
    for loss, min_weight in ((gold, math.inf), (h_kl, 0.6))
}


def value_of(loss: Callable[..., Any], **options: Any) -> float:
    """Return the sum over the units."""
    batch = two_tokenizers()
    return loss(
        batch.student, batch.teacher, **batch.chunk_arguments, normalizer=1, temperature=TAU, **options
    ).loss.item()


def units(batch: Batch) -> Iterator[tuple[Tensor, Tensor, list[int], list[int]]]:
    """Yield each unit's log-probabilities at all its positions on both sides, at TAU, and its tokens."""
    for student_side, teacher_side in plain_texts(batch):
        for _, x, y, z, w in reference.aligned(student_side, teacher_side):
            yield (z.detach() / TAU).log_softmax(1), (w / TAU).log_softmax(1), x, y


def divergence(log_t: Tensor, log_s: Tensor, kind: str, **weights: float) -> Tensor:
    return reference.divergence({"divergence": kind, "beta": 0.5, "mixed_weight": 0.5, **weights}, log_t, log_s)


def common_and_tails(log_t: Tensor, log_s: Tensor, pairs: Pairs, num_ranks: int, kind: str, **weights: float) -> tuple:
    student_columns, teacher_columns = pairs
    tails = reference.outside(log_t, teacher_columns).exp(), reference.outside(log_s, student_columns).exp()
    common = divergence(log_t[teacher_columns], log_s[student_columns], kind, **weights)
    return common, reference.sorted_l1(*tails, num_ranks)


@pytest.mark.parametrize(("uncommon_topk", "num_ranks"), [(2, 2), (5, None)])
@pytest.mark.parametrize(("kind", "weights"), KINDS)
@pytest.mark.parametrize("loss", [gold, h_kl])
def test_paired_losses_of_nemo_rl(loss, kind, weights, uncommon_topk, num_ranks):
    """Catches a renormalised mean, and tails that are not cut to the length of the student's, the shorter one."""
    pairs = PAIRS[loss]
    num_ranks = num_ranks or len(STUDENT) - len(pairs[0])
    assert num_ranks <= uncommon_topk
    total = sum(
        sum(common_and_tails(log_q.mean(0), log_p.mean(0), pairs, num_ranks, kind, **weights))
        for log_p, log_q, _, _ in units(two_tokenizers())
    )
    options = {"compat": "nemo_rl", "uncommon_topk": uncommon_topk, "divergence": kind, **weights}
    assert value_of(loss, projection=pair(), **options) == pytest.approx(TAU**2 * total.item(), rel=1e-12)


@pytest.mark.parametrize(("kind", "weights"), KINDS)
@pytest.mark.parametrize("loss", [gold, h_kl])
def test_paired_losses_of_trl(loss, kind, weights):
    """Catches another merge than `observed`, or another share of the pairs than TRL's."""
    pairs, total = PAIRS[loss], torch.zeros(())
    share = len(pairs[0]) / len(TEACHER)
    for log_p, log_q, x, y in units(two_tokenizers()):
        sides = reference.merged(log_q, y, "observed"), reference.merged(log_p, x, "observed")
        common, tails = common_and_tails(*sides, pairs, 99, kind, **weights)
        total = total + share * common + (1 - share) * tails
    options = {"compat": "trl", "divergence": kind, **weights}
    assert value_of(loss, projection=pair(), **options) == pytest.approx(total.item(), rel=1e-12)


@pytest.mark.parametrize("top_k", [4, None])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_p_kl_of_nemo_rl(kind, top_k):
    """Columns are chosen over all positions. Catches a teacher normalised after the mean, or a student before it."""
    R = plain_maps(pair(), TEACHER)["R"]
    largest = two_tokenizers().teacher.flatten(0, 1).amax(0)
    columns = [t for t in reference.top(largest, len(TEACHER)) if R[:, t].any()][:top_k]
    total = torch.zeros(())
    for log_p, log_q, _, _ in units(two_tokenizers()):
        s = log_p.exp().mean(0) @ R[:, columns]
        total = total + divergence(log_q[:, columns].log_softmax(1).mean(0), s.log().log_softmax(0), kind)
    options = {"compat": "nemo_rl", "vocab_topk": top_k, "divergence": kind, "chunk_size": 3}
    assert value_of(p_kl, projection=pair(), **options) == pytest.approx(TAU**2 * total.item(), rel=1e-12)


def test_uld_of_trl():
    """Catches another merge than `observed`, or tails that are cut."""
    total = torch.zeros(())
    for log_p, log_q, x, y in units(two_tokenizers()):
        sides = reference.merged(log_q, y, "observed"), reference.merged(log_p, x, "observed")
        total = total + reference.sorted_l1(*(side.exp() for side in sides), 99)
    assert value_of(uld, compat="trl") == pytest.approx(total.item(), rel=1e-12)


@pytest.mark.parametrize(
    "run",
    [
        partial(gold, projection=pair(), compat="trl"),
        partial(h_kl, projection=pair(), compat="nemo_rl", divergence="jsd"),
        partial(p_kl, projection=pair(), compat="nemo_rl", vocab_topk=4),
        partial(uld, compat="trl"),
    ],
)
def test_gradients(run):
    batch = two_tokenizers(scale=1.0)
    student = batch.student.requires_grad_()

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return run(logits, batch.teacher, **batch.chunk_arguments, chunk_size=3).loss

    assert torch.autograd.gradcheck(loss, student, rtol=1e-6, atol=1e-7, fast_mode=True)
