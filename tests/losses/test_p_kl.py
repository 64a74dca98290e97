import itertools

import numpy as np
import pytest
import torch

from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.losses import p_kl
from nemo_opd.losses.arguments import chunk_starts
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


def test_the_matrix_has_what_the_tests_are_about():
    reached = [t for row in MATRIX.rows() for t in row]
    assert len(set(reached)) < W
    assert len(set(reached)) < len(reached)
    assert any(not row for row in MATRIX.rows())
    assert chunk_starts(*CHUNKS)[0].sum() == 5


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


def test_gradient_of_forward_kl_and_coverage_is_the_closed_form():
    """∂L/∂z = p ⊙ (1 − R r)/τ with r = q̂/p̃ (methods.md §5.3), times τ², from a dense R."""
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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_topk": 0}, "vocab_topk=0"),
        ({"merge": "last"}, "merge='last'.*choose from first, mean"),
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
