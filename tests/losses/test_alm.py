import math

import numpy as np
import pytest
import torch

from nemo_opd.errors import ConfigError
from nemo_opd.losses.alm import alm

from . import oracle, oracle_prefix
from .test_memory import bytes_saved

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


@pytest.mark.parametrize("tau", [1.0, 1.7])
def test_gradient(tau):
    teacher = logits(T, W, 1)

    def loss(student):
        return run(student, teacher, temperature=tau, chunk_size=2, normalizer=4).loss

    assert torch.autograd.gradcheck(loss, logits(S, V, 0).requires_grad_())


def test_by_default_heads_of_different_width_are_used_whole():
    """Cut to the narrower one, the wider vocabulary's last tokens would have no logit."""
    ids = (torch.full_like(IDS[0], V - 1), torch.full_like(IDS[1], W - 1))
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    expected = oracle_prefix.alm(student.tolist(), teacher.tolist(), tuple(side.tolist() for side in ids), LISTS, 1.0)
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


def test_extreme_logits_are_finite():
    student = (150 * logits(S, V, 0, torch.float32).sign()).requires_grad_()
    out = run(student, 150 * logits(T, W, 1, torch.float32).sign())
    out.loss.backward()
    assert out.loss.isfinite()
    assert student.grad.isfinite().all()


def test_not_negative():
    for seed in range(20):
        assert run(logits(S, V, seed, torch.float32), logits(T, W, seed + 50, torch.float32)).loss >= 0


def test_low_precision_is_computed_in_fp32():
    student, teacher = logits(S, V, 0, torch.bfloat16).requires_grad_(), logits(T, W, 1, torch.bfloat16)
    out = run(student, teacher)
    out.loss.backward()
    assert student.grad.dtype == torch.bfloat16
    assert out.loss.item() == pytest.approx(run(student.double(), teacher.double()).loss.item(), rel=1e-5)


def test_invariant_to_chunks_microbatches_order_and_padding():
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    pad = torch.nn.functional.pad

    def settings_of(order, width, chunk_size, rows_per_call):
        z = pad(student[order], (0, 0, 0, width), value=7.0).requires_grad_()
        t = pad(teacher[order], (0, 0, 0, 2 * width), value=-3.0)
        widths = (width, 2 * width)
        chunks = [pad(side[order], (0, by), value=-1) for side, by in zip(CHUNKS, widths, strict=True)]
        ids = [pad(side[order], (0, by), value=1) for side, by in zip(IDS, widths, strict=True)]
        loss = sum(
            run(
                z[i:j],
                t[i:j],
                [side[i:j] for side in chunks],
                [side[i:j] for side in ids],
                normalizer=5,
                chunk_size=chunk_size,
            ).loss
            for i, j in ((k, k + rows_per_call) for k in range(0, B, rows_per_call))
        )
        (gradient,) = torch.autograd.grad(loss, z)
        return loss, gradient[:, :S][torch.argsort(torch.tensor(order))]

    reference = settings_of([0, 1], 0, None, 2)
    for setting in (([0, 1], 0, 1, 2), ([0, 1], 0, 2, 1), ([1, 0], 0, None, 2), ([1, 0], 4, 2, 1)):
        torch.testing.assert_close(settings_of(*setting), reference, rtol=1e-12, atol=1e-15)


def test_a_chunk_longer_than_the_budget_is_not_cut(monkeypatch):
    """Cut inside, its parts would count as two chunks."""
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    whole = run(student, teacher)
    monkeypatch.setattr("nemo_opd.losses.chunked.CPU_CHUNK_BYTES", 1)
    torch.testing.assert_close(run(student, teacher).loss, whole.loss, rtol=1e-12, atol=0)


def test_no_aligned_chunk_stays_connected():
    student = logits(S, V, 0).requires_grad_()
    out = run(student, logits(T, W, 1), tuple(torch.full_like(side, -1) for side in CHUNKS))
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()


@pytest.mark.parametrize("chunk_size", [16, None])
def test_saves_the_gradient_and_nothing_else(chunk_size):
    def loss(student, teacher):
        chunks = (torch.arange(student.shape[1]).expand(2, -1) // 2,) * 2
        ids = (torch.zeros_like(chunks[0]),) * 2
        return run(student, teacher, chunks, ids, chunk_size=chunk_size).loss

    assert bytes_saved(loss) <= 1.1


def test_what_does_not_fit_is_named():
    with pytest.raises(ConfigError, match="temperature=0"):
        run(logits(S, V, 0), logits(T, W, 1), temperature=0.0)
    with pytest.raises(ConfigError, match="chunk_size=0"):
        run(logits(S, V, 0), logits(T, W, 1), chunk_size=0)
