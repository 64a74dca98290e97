import math

import pytest
import torch

from nemo_opd.losses.alm import alm

from .cases import LOSSES


def one_token(log_odds: float) -> torch.Tensor:
    """Logits [1, 2, 2] that give token 0 the probability sigmoid(log_odds)."""
    return torch.tensor([[[log_odds, 0.0], [0.0, 0.0]]])


@pytest.mark.parametrize("student_odds", [-300.0, -50.0, 0.0, 5.0, 20.0, 50.0, 300.0])
@pytest.mark.parametrize("teacher_odds", [-300.0, -50.0, 0.0, 5.0, 50.0, 300.0])
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_extreme_likelihoods_have_the_right_value_and_gradient(student_odds, teacher_odds, tau):
    """Bug: in fp32, p = 1 − e^−300 rounds to 1, and log(1 − p) and the gradient's 1 / (1 − p) become infinite."""
    student = one_token(student_odds).requires_grad_()
    sides = dict.fromkeys(("student_ids", "teacher_ids"), torch.tensor([[0, 0]]))
    sides |= dict.fromkeys(("student_chunk_id", "teacher_chunk_id"), torch.tensor([[-1, 0]]))
    out = alm(student, one_token(teacher_odds), **sides, temperature=tau)
    out.loss.backward()
    x, x_q = (_surprise(odds) / tau for odds in (student_odds, teacher_odds))
    not_a, not_b = -math.expm1(-x_q), -math.expm1(-x)
    log_not_b = math.log(not_b) if not_b < 0.5 else math.log1p(-math.exp(-x))
    expected = tau * (math.exp(-x_q) * x - not_a * log_not_b)
    # Rounding of an exponent of 300 in fp32 is 300 · 2^−24 of a likelihood.
    assert out.loss.item() == pytest.approx(expected, rel=5e-5, abs=1e-37)
    slope = -(1 / (1 + math.exp(min(student_odds, 700))))
    expected_gradient = slope * (math.exp(-x_q) - math.exp(-x)) / not_b
    assert student.grad[0, 0, 0].item() == pytest.approx(expected_gradient, rel=5e-5, abs=1e-6)
    assert student.grad.isfinite().all()


def _surprise(odds: float) -> float:
    return max(-odds, 0) + math.log1p(math.exp(-abs(odds)))


def test_a_chunk_longer_than_the_budget_is_not_cut(monkeypatch):
    """Bug: a chunk cut by a block's end counts as two chunks."""
    (case,) = (case for case in LOSSES if case.loss is alm)
    uncut = case.run(case.batch())
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", 1)
    torch.testing.assert_close(case.run(case.batch()).loss, uncut.loss, rtol=1e-12, atol=0)
