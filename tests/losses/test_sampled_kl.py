"""Estimates of the KL on sampled tokens: their expected gradients, exactly, by summing over a small vocabulary."""

import math

import pytest
import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.losses import same_vocab, sampled_kl

from .cases import one_tokenizer, random_logits

V = 6
MASK = torch.tensor([[0, 1]])


def expected_gradient(student: Tensor, teacher: Tensor, **options) -> Tensor:
    """E over the token ~ p of the gradient of its loss: [1, 2, V] of which the first position predicts it."""
    p = student[0, 0].softmax(0).detach()
    total = torch.zeros_like(student)
    for token in range(V):
        leaf = student.detach().requires_grad_()
        loss = sampled_kl(leaf, teacher, ids=torch.tensor([[0, token]]), mask=MASK, **options).loss
        total += p[token] * torch.autograd.grad(loss, leaf)[0]
    return total


@pytest.mark.parametrize(
    ("estimator", "update", "divergence"),
    [
        ("k1", "policy_gradient", "reverse_kl"),
        ("k2", "direct", "reverse_kl"),
        ("k3", "direct", "forward_kl"),
        ("k1", "direct", None),
    ],
)
def test_expected_gradient(estimator, update, divergence):
    """methods.md §10.4. Bugs: a sign, an advantage that is differentiated, the ratio's derivative."""
    student, teacher = random_logits(1, 2, V, 0, 1.0), random_logits(1, 2, V, 1, 1.0)
    found = expected_gradient(student, teacher, estimator=estimator, update=update)
    if divergence is None:
        torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-15)
        return
    leaf = student.requires_grad_()
    loss = same_vocab(leaf, teacher, mask=MASK, divergence=divergence).loss
    torch.testing.assert_close(found, torch.autograd.grad(loss, leaf)[0], rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_value_is_the_reverse_kl_also_of_the_metric(estimator):
    student, teacher = random_logits(1, 2, V, 2, 1.0), random_logits(1, 2, V, 3, 1.0)
    p, total, metric = student[0, 0].softmax(0), 0.0, 0.0
    for token in range(V):
        out = sampled_kl(
            student, teacher, ids=torch.tensor([[0, token]]), mask=MASK, estimator=estimator, update="direct"
        )
        total += float(p[token] * out.loss)
        metric += float(p[token]) * out.metrics["kd"].value()
    expected = same_vocab(student, teacher, mask=MASK, divergence="reverse_kl").loss.item()
    assert (total, metric) == (pytest.approx(expected, rel=1e-11), pytest.approx(expected, rel=1e-11))


def test_policy_gradient_by_loops():
    """Clipping, dual clip, weights of sequences, the normalizer, and what is said of the ratios."""
    batch = one_tokenizer(3)
    mask, weights = batch.student_chunk_id >= 0, [0.5, 2.0]
    log_p, log_q = batch.student.log_softmax(-1), batch.teacher.log_softmax(-1)
    own = torch.zeros(2, 7, dtype=torch.float64)
    own[:, 1:] = log_p[:, :-1].gather(2, batch.student_ids[:, 1:, None]).squeeze(2)
    behaviour = own + random_logits(1, 2, 7, 4, 0.6)[0]
    total, ratios, clipped = 0.0, [], 0
    for b in range(2):
        for i in range(1, 7):
            if mask[b, i]:
                token = int(batch.student_ids[b, i])
                ratio = math.exp(float(own[b, i] - behaviour[b, i]))
                advantage = float(log_q[b, i - 1, token] - log_p[b, i - 1, token])
                gain = min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
                gain = max(gain, 1.5 * advantage) if advantage < 0 else gain
                total -= weights[b] * gain
                ratios.append(ratio)
                clipped += gain != ratio * advantage
    out = sampled_kl(
        batch.student,
        batch.teacher,
        ids=batch.student_ids,
        mask=mask,
        logprobs=behaviour,
        clip_high=0.3,
        dual_clip=1.5,
        sequence_weights=torch.tensor(weights),
        normalizer=11,
        chunk_size=2,
    )
    assert float(out.loss) == pytest.approx(total / 11, rel=1e-12)
    assert 0 < clipped < len(ratios)
    assert out.metrics["policy/clip_fraction"].value() == clipped / len(ratios)
    assert out.metrics["policy/ratio"].value() == pytest.approx(math.fsum(ratios) / len(ratios), rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_sides_have_no_gradient_whatever_the_engine_said(estimator):
    batch = one_tokenizer(5).with_student_as_teacher()
    student = batch.student.requires_grad_()
    out = sampled_kl(
        student,
        batch.teacher,
        ids=batch.student_ids,
        mask=batch.student_chunk_id >= 0,
        logprobs=torch.full((2, 7), -1.0),
        estimator=estimator,
    )
    assert out.loss.item() == 0
    assert not torch.autograd.grad(out.loss, student)[0].any()
    assert out.metrics["kd"].value() == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"estimator": "k4"}, "estimator='k4'.*k1, k2, k3"),
        ({"update": "none"}, "update='none'"),
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"dual_clip": 1.0}, "dual_clip=1.0"),
        ({"logprobs": torch.zeros(1, 3)}, "logprobs has shape"),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    logits = random_logits(1, 2, V, 0)
    with pytest.raises(ConfigError, match=message):
        sampled_kl(logits, logits, ids=torch.zeros(1, 2, dtype=torch.long), mask=MASK, **wrong)
