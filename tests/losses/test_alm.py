import math

import numpy as np
import pytest
import torch

from nemo_opd.losses.alm import alm

from . import oracle, oracle_prefix

B, S, T, V, W = 2, 14, 12, 7, 5
CHUNKS = oracle.random_chunk_ids(np.random.default_rng(1), B, S, T)
LISTS = tuple(side.tolist() for side in CHUNKS)
IDS = oracle_prefix.random_ids(0, CHUNKS, V, W)
COUNT = len(list(oracle_prefix.chunks_of(*LISTS)))


def logits(positions: int, width: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(B, positions, width, generator=generator, dtype=torch.float64)).to(dtype)


def run(student, teacher, chunks=CHUNKS, ids=IDS, **options):
    return alm(
        student,
        teacher,
        student_ids=ids[0],
        teacher_ids=ids[1],
        student_chunk_id=chunks[0],
        teacher_chunk_id=chunks[1],
        **options,
    )


def one_token(log_odds: float, dtype=torch.float32) -> torch.Tensor:
    """Logits [1, 2, 2] that give token 0 the probability sigmoid(log_odds)."""
    return torch.tensor([[[log_odds, 0.0], [0.0, 0.0]]], dtype=dtype)


ONE_CHUNK = (torch.tensor([[-1, 0]]), torch.tensor([[-1, 0]]))
ONE_ID = (torch.tensor([[0, 0]]), torch.tensor([[0, 0]]))


def test_the_chunks_have_what_the_tests_are_about():
    lengths = {(len(chunk.student), len(chunk.teacher)) for chunk in oracle_prefix.chunks_of(*LISTS)}
    assert len(lengths) >= 4
    assert any(m > 1 and n > 1 and m != n for m, n in lengths)


@pytest.mark.parametrize("tau", [1.0, 2.5])
@pytest.mark.parametrize("chunk_size", [1, 2, None])
def test_value_equals_the_loop(tau, chunk_size):
    """Every token of a chunk by the row before it, the power 1/τ of both likelihoods, and τ rather than τ²."""
    student, teacher = logits(S, V + 2, 0), logits(T, W + 3, 1)
    sizes = {"student_vocab_size": V, "teacher_vocab_size": W}
    out = run(student, teacher, temperature=tau, chunk_size=chunk_size, **sizes)
    cut = (student[..., :V].tolist(), teacher[..., :W].tolist())
    expected = oracle_prefix.alm(*cut, tuple(side.tolist() for side in IDS), LISTS, tau)
    # 1 − b of the oracle loses 2^−53/(1 − b), and no chunk here has b above 0.99.
    assert out.loss.item() == pytest.approx(expected / COUNT, rel=1e-12)
    assert out.metrics["kd"].value() == pytest.approx(expected / COUNT, rel=1e-12)
    assert out.metrics["kd"].count == COUNT


def test_by_default_heads_of_different_width_are_used_whole():
    """Cut to the narrower one, the wider vocabulary's last tokens would have no logit."""
    ids = (torch.full_like(IDS[0], V - 1), torch.full_like(IDS[1], W - 1))
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    expected = oracle_prefix.alm(student.tolist(), teacher.tolist(), tuple(side.tolist() for side in ids), LISTS, 100.0)
    assert run(student, teacher, ids=ids, normalizer=1).loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_teacher_equal_to_student_is_the_minimum(tau):
    """τ times the entropy of a coin, and no gradient at all."""
    student = logits(S, V, 0).requires_grad_()
    out = run(student, student.detach().clone(), (CHUNKS[0],) * 2, (IDS[0],) * 2, temperature=tau, normalizer=1)
    out.loss.backward()
    entropy = 0.0
    for chunk in oracle_prefix.chunks_of(LISTS[0], LISTS[0]):
        log_q = oracle_prefix.log_likelihood(student[chunk.b].tolist(), IDS[0][chunk.b].tolist(), chunk.student)
        a = math.exp(log_q / tau)
        entropy -= tau * (a * math.log(a) + (1 - a) * math.log1p(-a))
    assert out.loss.item() == pytest.approx(entropy, rel=1e-12)
    assert not student.grad.any()


def test_the_minimum_is_lower_than_what_is_near_it():
    student = logits(S, V, 0)
    chunks, ids = (CHUNKS[0],) * 2, (IDS[0],) * 2
    lowest = run(student, student, chunks, ids).loss
    for seed in range(5):
        assert run(student + 0.01 * logits(S, V, seed + 1), student, chunks, ids).loss > lowest


@pytest.mark.parametrize("student_odds", [-300.0, -50.0, 0.0, 5.0, 20.0, 50.0, 300.0])
@pytest.mark.parametrize("teacher_odds", [-300.0, -50.0, 0.0, 5.0, 50.0, 300.0])
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_extreme_likelihoods_have_the_right_value_and_gradient(student_odds, teacher_odds, tau):
    """In fp32 p = 1 − e^−300 rounds to 1, where log(1 − p) is −inf, and so does 1 − p at p = e^−300 in its gradient."""
    student = one_token(student_odds).requires_grad_()
    out = run(student, one_token(teacher_odds), ONE_CHUNK, ONE_ID, temperature=tau)
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
    """Cut inside, its parts would count as two chunks."""
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    whole = run(student, teacher)
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", 1)
    torch.testing.assert_close(run(student, teacher).loss, whole.loss, rtol=1e-12, atol=0)
