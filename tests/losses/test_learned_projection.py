import numpy as np
import pytest
import torch

from nemo_opd.errors import ProjectionError
from nemo_opd.losses import LearnedProjection, p_kl
from nemo_opd.projection import ProjectionMatrix

from . import oracle
from .learned import check_against_dense, check_gradient, moved_projection

B, S, T, V, W = 2, 9, 8, 9, 11
RANDOM = oracle.Matrix.random(V, W, 3, seed=0)
MATRIX = ProjectionMatrix(RANDOM.indices, RANDOM.weights, teacher_vocab_size=W)
CHUNKS = oracle.random_chunk_ids(np.random.default_rng(5), B, S, T)


def logits(positions: int, width: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(B, positions, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STUDENT, TEACHER = logits(S, V, 0), logits(T, W, 1)


def run(projection, student=STUDENT, **options):
    ids = [torch.zeros_like(side) for side in CHUNKS]
    return p_kl(
        student,
        TEACHER,
        projection=projection,
        student_ids=ids[0],
        teacher_ids=ids[1],
        student_chunk_id=CHUNKS[0],
        teacher_chunk_id=CHUNKS[1],
        **options,
    ).loss


def dense_loss(learned: LearnedProjection, delta: torch.Tensor, student: torch.Tensor, tau: float) -> torch.Tensor:
    """Compute forward KL + coverage, KL(q̂ ‖ p̃), by autograd through a dense R made from Δ."""
    start = torch.zeros(V, W, dtype=torch.float64)
    for s, row in enumerate(RANDOM.rows()):
        for t, weight in row.items():
            start[s, t] = weight
    full = torch.full((V, W), -torch.inf, dtype=torch.float64)
    for r, s in enumerate(learned.rows):
        for k, t in enumerate(RANDOM.indices[s]):
            if t >= 0:
                full[s, t] = start[s, t].log() + delta[r, k]
    has_several = torch.isin(torch.arange(V), torch.from_numpy(learned.rows)).unsqueeze(1)
    R = torch.where(has_several, full.softmax(1).nan_to_num(0), start)
    covered = start.sum(0) > 0
    units = oracle.units(*(side.tolist() for side in CHUNKS))
    total = 0
    for b, i, j in units:
        mass = (student[b, i] / tau).softmax(-1) @ R
        q = (TEACHER[b, j] / tau).softmax(-1)[covered]
        q = q / q.sum()
        total = total + (q * (q / mass[covered]).log()).sum()
    return tau**2 * total / len(units)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"temperature": 1.7}])
def test_gradients_equal_autograd_through_a_dense_r(options):
    """A row-softmax over more than the row's entries, a block's gradient that is lost, τ² or the divisor left out."""
    check_against_dense(MATRIX, STUDENT, run, dense_loss, **options)


@pytest.mark.parametrize("options", [{"merge": "mean"}, {"compat": "nemo_rl", "vocab_topk": 6}, {"divergence": "jsd"}])
def test_every_form_of_the_loss_has_the_gradient_of_its_values(options):
    """A form that reads other weights than those that are learned."""
    check_gradient(MATRIX, lambda learned: run(learned, **options))


def test_at_the_start_it_is_the_matrix():
    """A softmax that moves the rows before anything is learned; float32 rows sum to 1 within 1e-7."""
    learned = LearnedProjection(MATRIX)
    assert run(learned).item() == pytest.approx(run(MATRIX).item(), rel=1e-6)
    np.testing.assert_allclose(learned.matrix().weights, MATRIX.weights, atol=1e-7)
    assert learned.moved().max() < 1e-6


def test_what_is_learned_is_a_matrix_with_the_same_entries_and_the_same_loss():
    """Rows of one entry that change, weights that do not sum to 1, an export of another R."""
    learned = moved_projection(MATRIX)
    matrix = learned.matrix()
    assert run(matrix).item() == pytest.approx(run(learned).item(), rel=1e-6)
    np.testing.assert_array_equal(matrix.indices, MATRIX.indices)
    others = np.setdiff1d(np.arange(V), learned.rows)
    np.testing.assert_array_equal(matrix.weights[others], MATRIX.weights[others])
    changed = np.abs(matrix.weights - MATRIX.weights)[learned.rows].sum(1) / 2
    np.testing.assert_allclose(learned.moved(), changed, atol=1e-6)
    assert (changed > 1e-3).all()


def test_within_smaller_vocabularies_the_right_entries_are_learned():
    """A place in Δ that is counted among the entries that are left."""
    cut = {"student_vocab_size": V - 1, "teacher_vocab_size": W - 2}
    learned = moved_projection(MATRIX)
    run(learned, **cut).backward()
    assert run(learned, **cut).item() == pytest.approx(run(learned.matrix(), **cut).item(), rel=1e-6)
    assert not learned.delta.grad[torch.from_numpy(learned.rows == V - 1)].any()
    assert learned.delta.grad.abs().max() > 0.01


def test_without_a_gradient_of_the_student_it_is_learned_all_the_same():
    learned = moved_projection(MATRIX)
    run(learned, STUDENT.clone()).backward()
    assert learned.delta.grad.abs().max() > 0.01


def test_a_matrix_with_nothing_to_learn_is_refused():
    one = oracle.Matrix.identity(V)
    with pytest.raises(ProjectionError, match="no row of the projection has several entries"):
        LearnedProjection(ProjectionMatrix(one.indices, one.weights))
