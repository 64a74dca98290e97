"""Shares of a chunk's advantage (DPCA, methods.md §10.4) against the formula of each token's target."""

import math
from collections.abc import Iterator

import pytest
import torch

from nemo_opd.config.loss import SampledKLTerm
from nemo_opd.losses import sampled_chunk_kl
from tests.losses.cases import one_tokenizer, random_logits
from tests.losses.plain import compared_chunks, plain_texts
from tests.losses.test_sampled_chunk_kl import random_alignment
from tests.reference import losses as reference

DPCA = {"shares": "logprobs", "clip_high": 0.28, "dual_clip": 10.0}


def units_of(term: reference.Dict, text: reference.Dict, teacher: reference.Dict) -> Iterator[reference.Unit]:
    """Yield each chunk's loss and its value in `kd`.

    A token's advantage is log q − log p, within the clamp. The log q of a chunk are proportional to the log p, or
    equally far from them, and sum to the chunk's log-likelihood minus the estimate.
    """
    for tokens, x, y, z, w in reference.aligned(text, teacher):
        log_p = z.detach().log_softmax(1)[range(len(x)), x].tolist()
        s, t = math.fsum(log_p), reference.likelihood(w, y).item()
        target = s - {"k1": s - t, "k2": (s - t) ** 2 / 2}[term["estimator"]]
        log_q = [p + (target - s) / len(x) for p in log_p]
        if term["shares"] == "logprobs":
            log_q = [p * target / s for p in log_p]
        bound = term["advantage_clamp"] or math.inf
        advantages = [max(-bound, min(q - p, bound)) for q, p in zip(log_q, log_p, strict=True)]
        losses = [reference.policy(term, text, [i], a) for i, a in zip(tokens, advantages, strict=True)]
        weight = math.exp(s - math.fsum(text["drawn"][i] for i in tokens))
        yield sum(losses), torch.tensor(weight * (math.exp(t - s) - 1 + s - t), dtype=torch.float64)


@pytest.mark.parametrize(
    "settings",
    [
        DPCA | {"advantage_clamp": 10.0},
        DPCA | {"advantage_clamp": 0.5},
        {"shares": "equal", "estimator": "k2", "importance_cap": 1.1},
        {"shares": "logprobs", "importance_level": "sequence", "importance_cap": 2.0, "importance_veto": 0.3},
    ],
    ids=str,
)
def test_value_gradient_and_metrics(settings: dict) -> None:
    """Catches a ratio or weight of the whole chunk, a clamp of the chunk's advantage instead of the token's, shares by
    probability, and an advantage that is differentiated.
    """
    batch = random_alignment()
    log_p = batch.student.log_softmax(-1)[:, :-1].gather(2, batch.student_ids[:, 1:, None]).squeeze(2)
    logprobs, drawn = (torch.zeros(batch.student_ids.shape, dtype=torch.float64) for _ in range(2))
    noise = random_logits(*log_p.shape, 2, 9, 0.3)
    logprobs[:, 1:], drawn[:, 1:] = log_p + noise[..., 0], log_p + noise[..., 1]
    mask = batch.student_chunk_id >= 0
    mask[:, 0] = False
    term = SampledKLTerm(**settings).model_dump()
    arguments = {name: value for name, value in term.items() if name not in ("type", "normalizer")}
    student = batch.student.clone().requires_grad_()
    out = sampled_chunk_kl(
        student,
        batch.teacher,
        **batch.chunk_arguments,
        mask=mask,
        logprobs=logprobs,
        behaviour_logprobs=drawn,
        normalizer=5,
        chunk_size=2,
        **arguments,
    )
    texts = plain_texts(batch, behaviour=logprobs, drawn=drawn)
    units = [unit for student_side, teacher_side in texts for unit in units_of(term, student_side, teacher_side)]
    expected = sum(trained for trained, _ in units) / 5
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-11)
    (gradient,) = torch.autograd.grad(out.loss, student)
    expected_gradient = torch.stack(torch.autograd.grad(expected, [student_side["z"] for student_side, _ in texts]))
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-13)
    kd = out.metrics["kd"]
    assert kd.count == len(units)
    assert kd.value() == pytest.approx(sum(value.item() for _, value in units) / len(units), rel=1e-11)
    chunks = compared_chunks(batch.student_chunk_id, batch.teacher_chunk_id)
    num_tokens = sum(len(student) for _, student, _ in chunks)
    assert out.metrics["policy/ratio"].count == num_tokens > len(units)


@pytest.mark.parametrize("shares", ["equal", "logprobs"])
def test_chunks_of_one_token_have_the_whole_advantage(shares: str) -> None:
    """To the bit. Catches shares that do not sum to 1: with one tokenizer nothing is shared."""
    batch = one_tokenizer(3)
    student = batch.student.requires_grad_()
    plain, shared = (
        sampled_chunk_kl(student, batch.teacher, **batch.chunk_arguments, shares=way) for way in ("chunk", shares)
    )
    assert torch.equal(plain.loss, shared.loss)
    assert torch.equal(*(torch.autograd.grad(out.loss, student)[0] for out in (plain, shared)))


def test_a_certain_chunk_has_equal_shares() -> None:
    """Catches 0/0: a student that is certain of the sampled tokens has log-probabilities of 0."""
    batch = random_alignment()
    certain = torch.full_like(batch.student, -1e4)
    certain[:, :-1].scatter_(2, batch.student_ids[:, 1:, None].long(), 0.0)
    student = certain.requires_grad_()
    ways = [
        sampled_chunk_kl(student, batch.teacher, **batch.chunk_arguments, shares=way) for way in ("equal", "logprobs")
    ]
    assert torch.isfinite(ways[1].loss)
    assert torch.equal(ways[0].loss, ways[1].loss)
