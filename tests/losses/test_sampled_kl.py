"""Estimates of the KL on sampled tokens: exact expected gradients, by summing over a small vocabulary."""

import pytest
import torch
from torch import Tensor

from nemo_opd.losses import same_vocab, sampled_kl

from .cases import one_tokenizer, random_logits

V = 6
MASK = torch.tensor([[0, 1]])


def expected_gradient(student: Tensor, teacher: Tensor, **options) -> Tensor:
    """Return the expected gradient [1, 2, V] of the loss of a token ~ p; the first position predicts it."""
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
    gradient = expected_gradient(student, teacher, estimator=estimator, update=update)
    if divergence is None:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-15)
        return
    leaf = student.requires_grad_()
    loss = same_vocab(leaf, teacher, mask=MASK, divergence=divergence).loss
    torch.testing.assert_close(gradient, torch.autograd.grad(loss, leaf)[0], rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_sides_have_no_gradient_whatever_the_engine_said(estimator):
    """Bug: the engine's rounding pulls at a student that is already right."""
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
