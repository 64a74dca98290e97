"""h_kl with a projection that is learned (methods.md §2.8)."""

import numpy as np
import pytest
import torch

from nemo_opd.errors import ProjectionError
from nemo_opd.losses import LearnedProjection, h_kl
from nemo_opd.projection import ProjectionMatrix

from . import oracle, oracle_chunks
from .learned import check_against_dense, check_gradient, moved_projection
from .test_truncated import stored

B, S, T, V, W = 2, 9, 8, 20, 24
MATRIX = oracle_chunks.paired_matrix(V, W, 5, seed=0)
PAIRS = oracle_chunks.relaxed_pairs(MATRIX)
CHUNKS = oracle.random_chunk_ids(np.random.default_rng(5), B, S, T)


def logits(positions: int, width: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(B, positions, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STUDENT, TEACHER = logits(S, V, 0), logits(T, W, 1)


def run(projection, student=STUDENT, teacher=TEACHER, **options):
    ids = [torch.zeros_like(side) for side in CHUNKS]
    return h_kl(
        student,
        teacher,
        projection=projection,
        student_ids=ids[0],
        teacher_ids=ids[1],
        student_chunk_id=CHUNKS[0],
        teacher_chunk_id=CHUNKS[1],
        **options,
    ).loss


def dense_loss(learned: LearnedProjection, delta: torch.Tensor, student: torch.Tensor, tau: float) -> torch.Tensor:
    """Forward KL on pairs and rest, and the tails, by autograd through a dense R made from Δ, of a row at a time."""
    full = torch.full((V, W), -torch.inf, dtype=torch.float64)
    for s in range(V):
        r = np.flatnonzero(learned.rows == s)
        for k, t in enumerate(MATRIX.indices[s]):
            if t >= 0:
                full[s, t] = np.log(MATRIX.weights[s, k].astype(np.float64)) + (delta[r[0], k] if len(r) else 0)
    R = full.softmax(1).nan_to_num(0)
    others_p = torch.tensor([s for s in range(V) if s not in PAIRS])
    others_q = torch.tensor([t for t in range(W) if t not in PAIRS.values()])
    units = oracle.units(*(side.tolist() for side in CHUNKS))
    total = 0
    for b, i, j in units:
        p, q = (student[b, i] / tau).softmax(-1), (TEACHER[b, j] / tau).softmax(-1)
        cells_p = torch.stack([p[s] * R[s, t] for s, t in PAIRS.items()])
        cells_q = torch.stack([q[t] for t in PAIRS.values()])
        cells_p, cells_q = (torch.cat([cells, 1 - cells.sum(0, keepdim=True)]) for cells in (cells_p, cells_q))
        tails = p[others_p].sort(descending=True).values, q[others_q].sort(descending=True).values
        length = max(map(len, tails))
        tails = tuple(torch.cat([tail, tail.new_zeros(length - len(tail))]) for tail in tails)
        total = total + (cells_q * (cells_q / cells_p).log()).sum() + (tails[0] - tails[1]).abs().sum()
    return tau**2 * total / len(units)


def test_the_matrix_has_what_the_tests_are_about():
    """Learned rows in a pair and in none, on one side of a collision too, and pairs of one entry."""
    learned = set(LearnedProjection(MATRIX).rows.tolist())
    assert 2 <= len(learned & set(PAIRS)) < len(learned)
    assert len(PAIRS) > len(learned & set(PAIRS))


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"temperature": 1.7}])
def test_gradients_equal_autograd_through_a_dense_r(options):
    """A share of another row's entry, a rest that lacks what pairs do not get, a block's gradient that is lost."""
    check_against_dense(MATRIX, STUDENT, run, dense_loss, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"merge": "mean"},
        {"merge": "observed"},
        {"compat": "nemo_rl"},
        {"compat": "trl"},
        {"divergence": "jsd"},
        {"divergence": "reverse_kl", "uncommon_weight": 0.0},
        {"continuation_weight": 0.5},
        {"teacher": stored(TEACHER, torch.zeros(B, T, dtype=torch.long), 3)},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_form_of_the_loss_has_the_gradient_of_its_values(options):
    """A form that reads the pairs without their shares."""
    check_gradient(MATRIX, lambda learned: run(learned, **options))


def test_with_all_of_a_row_in_its_pair_it_is_the_matrix():
    """Pairs other than those of the matrix that it began with; a rest that has what it should not have."""
    learned = LearnedProjection(MATRIX)
    heaviest = torch.from_numpy(MATRIX.weights[learned.rows].argmax(1))
    learned.delta.data[torch.arange(len(heaviest)), heaviest] = 100
    assert run(learned).item() == pytest.approx(run(MATRIX).item(), rel=1e-12)


def test_tokens_of_no_pair_get_no_gradient():
    """A share that is read by a pair's place among the rows, or by the row's among the pairs."""
    learned = moved_projection(MATRIX)
    run(learned).backward()
    has_gradient = learned.delta.grad.abs().amax(1) > 0
    assert learned.rows[has_gradient.numpy()].tolist() == [s for s in learned.rows.tolist() if s in PAIRS]


def test_where_all_tokens_are_paired_the_rest_is_what_they_do_not_give():
    """A rest cell that is left out, as it is without learned weights: 0.7 p of the one row, against q of no pair."""
    rows = np.array([[0, 2], [1, -1]])
    weights = np.array([[0.7, 0.3], [1, 0]], dtype=np.float32)
    matrix = ProjectionMatrix(rows, weights, teacher_vocab_size=3)
    student, teacher = STUDENT[:, :, :2], TEACHER[:, :, :3]
    found = run(LearnedProjection(matrix), student, teacher, uncommon_weight=0.0)
    units = oracle.units(*(side.tolist() for side in CHUNKS))
    p, q = student.softmax(-1), teacher.softmax(-1)
    own = [torch.stack([0.7 * p[b, i, 0], p[b, i, 1], 0.3 * p[b, i, 0]]) for b, i, _ in units]
    expected = sum((q[b, j] * (q[b, j] / cells).log()).sum() for cells, (b, _, j) in zip(own, units, strict=True))
    assert found.item() == pytest.approx(expected.item() / len(units), rel=1e-6)


def test_within_smaller_vocabularies_the_right_pairs_are_learned():
    """Pairs of the whole vocabularies that are kept for the smaller ones."""
    cut = {"student_vocab_size": V - 3, "teacher_vocab_size": W - 2}
    learned = moved_projection(MATRIX)
    run(learned)
    run(learned, **cut).backward()
    gone = torch.from_numpy(learned.rows >= V - 3)
    assert gone.any()
    assert not learned.delta.grad[gone].any()
    assert learned.delta.grad.abs().max() > 0.01


def test_a_matrix_of_which_no_learned_row_is_in_a_pair_is_refused():
    exact = np.array([True, False])
    matrix = ProjectionMatrix(np.array([[0, -1], [0, 1]]), np.array([[1, 0], [0.9, 0.1]]), exact, teacher_vocab_size=2)
    with pytest.raises(ProjectionError, match=r"no row .* is in a pair of h_kl .* use p_kl, which learns every row"):
        run(LearnedProjection(matrix), STUDENT[:, :, :2], TEACHER[:, :, :2])
