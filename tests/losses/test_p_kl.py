import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.losses import p_kl, same_vocab
from nemo_opd.losses.reduction import count_chunks
from nemo_opd.losses.sparse_projection import SparseProjection

from . import oracle, oracle_chunks

B, S, T, V, W = 2, 7, 6, 9, 11
MATRIX = oracle.Matrix.random(V, W, 3, seed=0)
CHUNKS = oracle.random_chunk_ids(np.random.default_rng(3), B, S, T)


def logits(positions: int, width: int, seed: int, dtype=torch.float64, rows: int = B) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, positions, width, generator=generator, dtype=torch.float64)).to(dtype)


def run(student, teacher, matrix=MATRIX, chunks=CHUNKS, **options):
    ids = (torch.zeros_like(side, dtype=torch.long) for side in chunks)
    return p_kl(
        student,
        teacher,
        projection=matrix,
        student_ids=next(ids),
        teacher_ids=next(ids),
        student_chunk_id=chunks[0],
        teacher_chunk_id=chunks[1],
        **options,
    )


def identity_chunks() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(S, dtype=torch.int32).expand(B, S).contiguous()
    return ids, ids


def test_the_matrix_has_what_the_tests_are_about():
    reached = [t for row in MATRIX.rows() for t in row]
    assert len(set(reached)) < W
    assert len(set(reached)) < len(reached)
    assert any(not row for row in MATRIX.rows())
    assert count_chunks(*CHUNKS) == 5


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize(("tau", "coef"), [(1.0, 1.0), (2.5, 0.3)])
def test_value_equals_the_loop(kind, weights, tau, coef):
    """The predictors of both sides, wider heads, uncovered columns, renormalisation, coverage and τ² on both."""
    student, teacher = logits(S, V + 2, 0), logits(T, W + 3, 1)
    out = run(student, teacher, divergence=kind, temperature=tau, coverage_coef=coef, chunk_size=2, **weights)
    chunks = tuple(side.tolist() for side in CHUNKS)
    expected = oracle.p_kl(student.tolist(), teacher.tolist(), MATRIX, chunks, kind, tau, coef, **weights)
    count = len(oracle.units(*chunks))
    # The matrix holds float32 weights on both sides, so float64 arithmetic is the only difference.
    assert out.loss.item() == pytest.approx(expected / count, rel=1e-11)
    assert out.metrics["kd"].value() == pytest.approx(expected / count, rel=1e-11)
    assert out.metrics["kd"].count == count


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_gradient(kind, weights):
    teacher = logits(T, W, 1)

    def loss(student):
        return run(student, teacher, divergence=kind, temperature=1.7, chunk_size=2, normalizer=4, **weights).loss

    assert torch.autograd.gradcheck(loss, logits(S, V + 1, 0).requires_grad_())


def test_gradient_of_forward_kl_and_coverage_is_the_closed_form():
    """∂L/∂z = p ⊙ (1 − R r)/τ with r = q̂/p̃ (METHODS §5), times τ², from a dense R."""
    tau = 1.3
    chunks = (torch.tensor([[-1, 0]]), torch.tensor([[-1, 0]]))
    student, teacher = logits(2, V, 0, rows=1).requires_grad_(), logits(2, W, 1, rows=1)
    run(student, teacher, chunks=chunks, temperature=tau).loss.backward()
    dense = np.zeros((V, W))
    for s, row in enumerate(MATRIX.rows()):
        for t, weight in row.items():
            dense[s, t] = weight
    covered = dense.any(0)
    p = np.array(oracle.softmax(student[0, 0].tolist(), tau))
    q = np.array(oracle.softmax(teacher[0, 0].tolist(), tau)) * covered
    mass = p @ dense
    r = np.divide(q / q.sum(), mass, out=np.zeros(W), where=covered)
    np.testing.assert_allclose(student.grad[0, 0], tau**2 * p * (1 - dense @ r) / tau, rtol=1e-10, atol=1e-14)
    assert not student.grad[0, 1].any()


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_same_tokenizer_equals_same_vocab(kind, weights):
    student, teacher = logits(S, V, 0).requires_grad_(), logits(S, V, 1)
    options = {"divergence": kind, "temperature": 1.4} | weights
    projected = run(student, teacher, oracle.Matrix.identity(V), identity_chunks(), **options).loss
    direct = same_vocab(student, teacher, mask=torch.ones(B, S), **options).loss
    torch.testing.assert_close(projected, direct, rtol=1e-13, atol=0)
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (projected, direct)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_teacher_equal_to_student_is_exactly_zero(kind, weights):
    student = logits(S, V, 0, torch.bfloat16).requires_grad_()
    matrix = oracle.Matrix.identity(V)
    out = run(student, student.detach().clone(), matrix, identity_chunks(), divergence=kind, temperature=0.7, **weights)
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_extreme_logits_are_finite(kind, weights):
    """Columns whose every student token has probability e^−300: only a log-sum-exp by column keeps them."""
    student = (150 * logits(S, V, 0, torch.float32).sign()).requires_grad_()
    out = run(student, 150 * logits(T, W, 1, torch.float32).sign(), divergence=kind, **weights)
    out.loss.backward()
    assert out.loss.isfinite()
    assert out.loss > 0
    assert student.grad.isfinite().all()
    assert student.grad.any()


def test_extreme_logits_have_the_right_value():
    """Finite but wrong is what a floor of ε gives."""
    student, teacher = 150 * logits(S, V, 0).sign(), 150 * logits(T, W, 1).sign()
    chunks = tuple(side.tolist() for side in CHUNKS)
    expected = oracle.p_kl(student.tolist(), teacher.tolist(), MATRIX, chunks, "forward_kl", 1.0, 1.0)
    loss = run(student.float(), teacher.float(), normalizer=1).loss
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_forbidden_student_tokens_are_finite():
    """A logit of −inf on all tokens of a column leaves that column without student mass."""
    matrix = oracle.Matrix(np.array([[0], [1], [1]], np.int32), np.ones((3, 1), np.float32), 3, 3)
    student = torch.tensor([[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]])
    student[..., :1] = -torch.inf
    teacher = student[..., [0, 1, 1]].clone()
    chunks = (torch.tensor([[-1, 0]]), torch.tensor([[-1, 0]]))
    student.requires_grad_()
    out = run(student, teacher, matrix, chunks)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0, abs=1e-6)
    assert student.grad.isfinite().all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(oracle.KINDS), coef=st.floats(0, 2))
def test_not_negative(seed, kind, coef):
    """−log of a mass ≤ 1 and a divergence; fp32 rounds log-ratios of at most 50 nats by 2^−24 of that."""
    name, weights = kind
    student, teacher = logits(S, V, seed, torch.float32), logits(T, W, seed // 2 + 1, torch.float32)
    assert run(student, teacher, divergence=name, coverage_coef=coef, **weights).loss.item() >= -3 * 50 * 2**-23


def test_invariant_to_chunks_microbatches_order_and_padding():
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    pad = torch.nn.functional.pad

    def settings_of(order, width, chunk_size, rows_per_call):
        z = pad(student[order], (0, 0, 0, width), value=7.0).requires_grad_()
        t = pad(teacher[order], (0, 0, 0, 2 * width), value=-3.0)
        chunks = [pad(side[order], (0, k * width), value=-1) for side, k in zip(CHUNKS, (1, 2), strict=True)]
        loss = sum(
            run(z[i:j], t[i:j], chunks=tuple(side[i:j] for side in chunks), normalizer=5, chunk_size=chunk_size).loss
            for i, j in ((k, k + rows_per_call) for k in range(0, B, rows_per_call))
        )
        (gradient,) = torch.autograd.grad(loss, z)
        return loss, gradient[:, :S][torch.argsort(torch.tensor(order))]

    reference = settings_of([0, 1], 0, None, 2)
    for setting in (([0, 1], 0, 1, 2), ([0, 1], 0, 2, 1), ([1, 0], 0, None, 2), ([1, 0], 4, 2, 1)):
        torch.testing.assert_close(settings_of(*setting), reference, rtol=1e-12, atol=1e-15)


def test_no_aligned_chunk_stays_connected():
    student = logits(S, V, 0).requires_grad_()
    out = run(student, logits(T, W, 1), chunks=tuple(torch.full_like(side, -1) for side in CHUNKS))
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()


def test_a_given_size_drops_what_lies_beyond_it():
    """A head narrower than its tokenizer is the user's choice; entries beyond it are mass that is not covered."""
    sizes = {"student_vocab_size": V - 2, "teacher_vocab_size": W - 2}
    student, teacher = logits(S, V - 2, 0), logits(T, W - 2, 1)
    kept = np.where((MATRIX.indices < W - 2), MATRIX.indices, -1)[: V - 2]
    smaller = oracle.Matrix(kept, MATRIX.weights[: V - 2], V - 2, W - 2)
    chunks = tuple(side.tolist() for side in CHUNKS)
    expected = oracle.p_kl(student.tolist(), teacher.tolist(), smaller, chunks, "forward_kl", 1.0, 1.0)
    assert run(student, teacher, normalizer=1, **sizes).loss.item() == pytest.approx(expected, rel=1e-11)


def test_a_matrix_is_brought_to_a_device_once_and_let_go_with_it():
    matrix = oracle.Matrix.random(V, W, 2, seed=5)
    device = torch.device("cpu")
    sparse = SparseProjection.of(matrix, V, W, device)
    assert SparseProjection.of(matrix, V, W, device) is sparse
    assert SparseProjection.of(matrix, V, W - 1, device) is not sparse
    again = oracle.Matrix(matrix.indices, matrix.weights.copy(), V, W)
    del matrix
    assert SparseProjection.of(again, V, W, device) is not sparse


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize("top_k", [1, 4])
def test_vocab_topk_equals_the_loop(kind, weights, top_k):
    """Columns by their largest logit over the units alone, the same for all, and a rest cell of covered columns."""
    student, teacher = logits(S, V + 2, 0), logits(T, W + 3, 1)
    chunks = tuple(side.tolist() for side in CHUNKS)
    compared = {(b, j) for b, _, j in oracle.units(*chunks)}
    for b, j in ((b, j) for b in range(B) for j in range(T) if (b, j) not in compared):
        teacher[b, j, b] += 50
    options = {"temperature": 1.6, "coverage_coef": 0.7, "vocab_topk": top_k}
    loss = run(student, teacher, divergence=kind, chunk_size=2, normalizer=1, **options, **weights).loss
    kept = oracle_chunks.most_important(MATRIX, [teacher[b, j].tolist() for b, j in compared], top_k)
    expected = oracle_chunks.p_kl_top_k(
        student.tolist(), teacher.tolist(), MATRIX, chunks, kind, 1.6, 0.7, kept, **weights
    )
    assert loss.item() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_vocab_topk_gradient(kind, weights):
    teacher = logits(T, W, 1)

    def loss(student):
        return run(student, teacher, divergence=kind, vocab_topk=3, chunk_size=2, normalizer=4, **weights).loss

    assert torch.autograd.gradcheck(loss, logits(S, V + 1, 0).requires_grad_())


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_vocab_topk_is_bounded_by_all_columns_and_equal_at_their_number(kind, weights):
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    num_columns = len({t for row in MATRIX.rows() for t in row})
    losses = [
        run(student, teacher, divergence=kind, vocab_topk=k, **weights).loss.item()
        for k in (*range(1, num_columns + 1), 10**6)
    ]
    # Fewer cells are a coarser view of the same two distributions; float64 rounds 1e-16 of the value.
    assert all(coarse <= fine + 1e-13 for coarse, fine in itertools.pairwise(losses))
    assert losses[-2] == losses[-1] == run(student, teacher, divergence=kind, **weights).loss.item()


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_vocab_topk_with_teacher_equal_to_student_is_exactly_zero(kind, weights):
    student = logits(S, V, 0, torch.bfloat16).requires_grad_()
    matrix = oracle.Matrix.identity(V)
    teacher = student.detach().clone()
    out = run(student, teacher, matrix, identity_chunks(), divergence=kind, vocab_topk=4, **weights)
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()


def test_vocab_topk_without_units_stays_connected():
    student = logits(S, V, 0).requires_grad_()
    out = run(student, logits(T, W, 1), chunks=tuple(torch.full_like(side, -1) for side in CHUNKS), vocab_topk=3)
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_topk": 0}, "vocab_topk=0"),
        ({"merge": "last"}, "merge='last'.*choose from first, mean"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"student_vocab_size": V + 1}, f"student_vocab_size={V + 1}"),
        ({"chunks": (CHUNKS[0][:, 1:], CHUNKS[1])}, "student_ids has shape"),
        ({"teacher": logits(T, W - 1, 1)}, f"teacher_vocab_size={W}: the logits have {W - 1}"),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        run(**({"student": logits(S, V, 0), "teacher": logits(T, W, 1)} | wrong))


def test_an_empty_matrix_is_refused():
    empty = oracle.Matrix(np.full((V, 2), -1, np.int32), np.zeros((V, 2), np.float32), V, W)
    with pytest.raises(ProjectionError, match="no entry"):
        run(logits(S, V, 0), logits(T, W, 1), empty)
