"""p_kl and h_kl with a learned projection (methods.md §2.8)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_opd.config.loss import HKLTerm, PKLTerm
from nemo_opd.errors import ProjectionError
from nemo_opd.losses import LearnedProjection, h_kl, p_kl
from nemo_opd.projection import ProjectionMatrix
from tests.reference import losses as reference

from .cases import identity, random_chunk_ids
from .learned import check_against_dense, check_gradient, moved_projection
from .plain import compared_chunks, plain_maps, plain_term
from .projections import paired_matrix
from .test_truncated import stored

B, S, T, V, W = 2, 9, 8, 20, 24
MATRIX = paired_matrix(V, W, 5, seed=0)
MAPS = plain_maps(MATRIX, ())
PAIRS = dict(zip(*reference.pairs_of(MAPS, 0.6), strict=True))
CHUNKS = random_chunk_ids(np.random.default_rng(5), B, S, T)
UNITS = [(b, ours[0] - 1, theirs[0] - 1) for b, ours, theirs in compared_chunks(*CHUNKS)]
"""Row, and the positions of both sides' logits."""


def logits(positions: int, width: int, seed: int) -> Tensor:
    return 2 * torch.randn(B, positions, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STUDENT, TEACHER = logits(S, V, 0), logits(T, W, 1)


def run(
    loss: Callable[..., Any],
    projection: ProjectionMatrix | LearnedProjection,
    student: Tensor = STUDENT,
    teacher: Tensor = TEACHER,
    **options: Any,
) -> Tensor:
    ids = [torch.zeros_like(side) for side in CHUNKS]
    chunks = {"student_chunk_id": CHUNKS[0], "teacher_chunk_id": CHUNKS[1]}
    arguments = {"student_ids": ids[0], "teacher_ids": ids[1], **chunks}
    return loss(student, teacher, projection=projection, **arguments, **options).loss


def dense(learned: LearnedProjection, delta: Tensor) -> Tensor:
    """Build R from Δ, row by row."""
    rows = []
    for s in range(V):
        r = np.flatnonzero(learned.rows == s)
        moved = torch.full((W,), -torch.inf, dtype=torch.float64)
        for k, t in enumerate(MATRIX.indices[s]):
            if t >= 0 and len(r):
                moved[t] = MAPS["R"][s, t].log() + delta[r[0], k]
        rows.append(moved.softmax(0) if len(r) else MAPS["R"][s])
    return torch.stack(rows)


def dense_p_kl(learned: LearnedProjection, delta: Tensor, student: Tensor, tau: float) -> Tensor:
    """Compute p_kl by autograd through a dense R."""
    term, maps = plain_term(PKLTerm()), {"R": dense(learned, delta), "kept": []}
    sides = (((TEACHER[b, j] / tau).log_softmax(0), (student[b, i] / tau).log_softmax(0)) for b, i, j in UNITS)
    return tau**2 * sum(reference.p_kl(term, maps, *logs) for logs in sides) / len(UNITS)


def dense_h_kl(learned: LearnedProjection, delta: Tensor, student: Tensor, tau: float) -> Tensor:
    """Compute forward KL on pairs and rest cell, and the tails, by autograd through a dense R."""
    term, total, student_columns, teacher_columns = (
        plain_term(HKLTerm()),
        torch.zeros(()),
        list(PAIRS),
        list(PAIRS.values()),
    )
    shares = dense(learned, delta)[student_columns, teacher_columns]
    for b, i, j in UNITS:
        p, q = (student[b, i] / tau).softmax(-1), (TEACHER[b, j] / tau).softmax(-1)
        cells = (
            torch.cat([mass, 1 - mass.sum(0, keepdim=True)]).log()
            for mass in (q[teacher_columns], p[student_columns] * shares)
        )
        tails = reference.sorted_l1(reference.outside(q, teacher_columns), reference.outside(p, student_columns), V + W)
        total = total + reference.divergence(term, *cells) + tails
    return tau**2 * total / len(UNITS)


def test_the_matrix_has_learned_rows_of_all_kinds() -> None:
    """Bug: a matrix without learned rows in pairs and outside of them, or without pairs of one entry."""
    learned = set(LearnedProjection(MATRIX).rows.tolist())
    assert 2 <= len(learned & set(PAIRS)) < len(learned)
    assert len(PAIRS) > len(learned & set(PAIRS))


@pytest.mark.parametrize(("loss", "dense_loss"), [(p_kl, dense_p_kl), (h_kl, dense_h_kl)])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"temperature": 1.7}])
def test_gradients_equal_autograd_through_a_dense_r(
    loss: Callable[..., Any], dense_loss: Callable[..., Tensor], options: dict[str, Any]
) -> None:
    """Bugs: a row-softmax over more than the row's entries, a share of another row's entry, a rest cell without the
    mass that pairs do not get, a lost gradient of a block, a missing τ² or divisor.
    """

    def by_loss(learned: LearnedProjection, student: Tensor, **more: Any) -> Tensor:
        return run(loss, learned, student, **more)

    check_against_dense(MATRIX, STUDENT, by_loss, dense_loss, **options)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (p_kl, {"merge": "mean"}),
        (p_kl, {"compat": "nemo_rl", "vocab_topk": 6}),
        (p_kl, {"divergence": "jsd"}),
        (h_kl, {"merge": "mean"}),
        (h_kl, {"merge": "observed"}),
        (h_kl, {"compat": "nemo_rl"}),
        (h_kl, {"compat": "trl"}),
        (h_kl, {"divergence": "jsd"}),
        (h_kl, {"divergence": "reverse_kl", "uncommon_weight": 0.0}),
        (h_kl, {"continuation_weight": 0.5}),
        (h_kl, {"teacher": stored(TEACHER, torch.zeros(B, T, dtype=torch.long), 3)}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.__name__,
)
def test_every_form_of_the_loss_has_the_gradient_of_its_values(
    loss: Callable[..., Any], options: dict[str, Any]
) -> None:
    """Bug: a form that reads other weights than the learned ones, or the pairs without their shares."""
    check_gradient(MATRIX, lambda learned: run(loss, learned, **options))


def test_at_the_start_it_equals_the_matrix() -> None:
    """Bug: a softmax that moves the rows before anything is learned. float32 rows sum to 1 within 1e-7."""
    learned = LearnedProjection(MATRIX)
    assert run(p_kl, learned).item() == pytest.approx(run(p_kl, MATRIX).item(), rel=1e-6)
    np.testing.assert_allclose(learned.matrix().weights, MATRIX.weights, atol=1e-7)
    assert learned.moved().max() < 1e-6


def test_with_all_mass_in_its_pair_it_equals_the_matrix() -> None:
    """Bug: other pairs than the initial matrix has, or a rest cell with mass of a pair."""
    learned = LearnedProjection(MATRIX)
    heaviest = torch.from_numpy(MATRIX.weights[learned.rows].argmax(1))
    learned.delta.data[torch.arange(len(heaviest)), heaviest] = 100
    assert run(h_kl, learned).item() == pytest.approx(run(h_kl, MATRIX).item(), rel=1e-12)


def test_the_learned_matrix_has_the_same_entries_and_the_same_loss() -> None:
    """Bugs: rows of one entry that change, weights that do not sum to 1, an export of another R."""
    learned = moved_projection(MATRIX)
    matrix = learned.matrix()
    assert run(p_kl, matrix).item() == pytest.approx(run(p_kl, learned).item(), rel=1e-6)
    np.testing.assert_array_equal(matrix.indices, MATRIX.indices)
    fixed_rows = np.setdiff1d(np.arange(V), learned.rows)
    np.testing.assert_array_equal(matrix.weights[fixed_rows], MATRIX.weights[fixed_rows])
    changed = np.abs(matrix.weights - MATRIX.weights)[learned.rows].sum(1) / 2
    np.testing.assert_allclose(learned.moved(), changed, atol=1e-6)
    assert (changed > 1e-3).all()


def test_unpaired_tokens_get_no_gradient() -> None:
    """Bug: a share read at the pair's index among the rows, or the row's index among the pairs."""
    learned = moved_projection(MATRIX)
    run(h_kl, learned).backward()
    has_gradient = learned.delta.grad.abs().amax(1) > 0
    assert learned.rows[has_gradient.numpy()].tolist() == [s for s in learned.rows.tolist() if s in PAIRS]


def test_if_all_tokens_are_paired_the_rest_has_the_remaining_mass() -> None:
    """Bug: the rest cell is dropped, as without learned weights: 0.3 p of the first row against q of the unpaired
    token.
    """
    rows = np.array([[0, 2], [1, -1]])
    weights = np.array([[0.7, 0.3], [1, 0]], dtype=np.float32)
    matrix = ProjectionMatrix(rows, weights, teacher_vocab_size=3)
    student, teacher = STUDENT[:, :, :2], TEACHER[:, :, :3]
    loss = run(h_kl, LearnedProjection(matrix), student, teacher, uncommon_weight=0.0)
    p, q = student.softmax(-1), teacher.softmax(-1)
    student_cells = [torch.stack([0.7 * p[b, i, 0], p[b, i, 1], 0.3 * p[b, i, 0]]) for b, i, _ in UNITS]
    expected = sum(
        (q[b, j] * (q[b, j] / cells).log()).sum() for cells, (b, _, j) in zip(student_cells, UNITS, strict=True)
    )
    assert loss.item() == pytest.approx(expected.item() / len(UNITS), rel=1e-6)


@pytest.mark.parametrize("loss", [p_kl, h_kl])
def test_within_smaller_vocabularies_the_right_entries_are_learned(loss: Callable[..., Any]) -> None:
    """Bug: an index into Δ counted among the remaining entries, or pairs of the full vocabularies."""
    cut = {"student_vocab_size": V - 3, "teacher_vocab_size": W - 2}
    learned = moved_projection(MATRIX)
    run(loss, learned)
    run(loss, learned, **cut).backward()
    if loss is p_kl:
        assert run(p_kl, learned, **cut).item() == pytest.approx(run(p_kl, learned.matrix(), **cut).item(), rel=1e-6)
    gone = torch.from_numpy(learned.rows >= V - 3)
    assert gone.any()
    assert not learned.delta.grad[gone].any()
    assert learned.delta.grad.abs().max() > 0.01


def test_the_projection_learns_without_a_gradient_of_the_student() -> None:
    """Bug: no gradient for Δ if the student's logits need none."""
    learned = moved_projection(MATRIX)
    run(p_kl, learned, STUDENT.clone()).backward()
    assert learned.delta.grad.abs().max() > 0.01


def test_a_projection_without_anything_to_learn_is_refused() -> None:
    """Bug: a run that trains a projection without a gradient."""
    with pytest.raises(ProjectionError, match="no row of the projection has several entries"):
        LearnedProjection(identity(V))
    exact = np.array([True, False])
    matrix = ProjectionMatrix(np.array([[0, -1], [0, 1]]), np.array([[1, 0], [0.9, 0.1]]), exact, teacher_vocab_size=2)
    with pytest.raises(ProjectionError, match=r"no row .* is in a pair of h_kl .* use p_kl, which learns every row"):
        run(h_kl, LearnedProjection(matrix), STUDENT[:, :, :2], TEACHER[:, :, :2])
