import numpy as np
import pytest
import torch

from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.losses.gold import gold, h_kl
from nemo_opd.losses.sparse_projection import TokenPairs
from nemo_opd.projection import ProjectionMatrix

from . import oracle, oracle_chunks

B, S, T, V, W = 2, 7, 6, 14, 16
MATRIX = oracle_chunks.paired_matrix(V, W, 4, seed=1)
CHUNKS = oracle.random_chunk_ids(np.random.default_rng(3), B, S, T)
CPU = torch.device("cpu")


def logits(positions: int, width: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(B, positions, width, generator=generator, dtype=torch.float64)).to(dtype)


def run(student, teacher, matrix=MATRIX, chunks=CHUNKS, loss=h_kl, **options):
    ids = [torch.zeros_like(side, dtype=torch.long) for side in chunks]
    return loss(
        student,
        teacher,
        projection=matrix,
        student_ids=ids[0],
        teacher_ids=ids[1],
        student_chunk_id=chunks[0],
        teacher_chunk_id=chunks[1],
        **options,
    )


def as_dict(pairs: TokenPairs) -> dict[int, int]:
    return dict(zip(pairs.student.tolist(), pairs.teacher.tolist(), strict=True))


def test_the_matrix_has_what_the_tests_are_about():
    """Relaxed pairs beside the exact ones, claims that lose, and tokens of no pair on both sides."""
    relaxed = oracle_chunks.relaxed_pairs(MATRIX)
    claims = int((MATRIX.weights >= 0.6).any(1).sum())
    assert len(oracle_chunks.exact_pairs(MATRIX)) < len(relaxed) < claims < V
    assert len(relaxed) < W


@pytest.mark.parametrize("seed", range(6))
def test_pairs_equal_the_loop(seed):
    matrix = oracle_chunks.paired_matrix(40, 30, 8, seed)
    assert as_dict(TokenPairs.relaxed(matrix, 40, 30, CPU)) == oracle_chunks.relaxed_pairs(matrix)


def test_who_wins_a_collision():
    """Teacher 0: an exact row against a lower id of the same weight. 1: the weight. 2: the id. 3: too light."""
    rows = [(0, 1.0), (1, 0.7), (2, 0.8), (0, 1.0), (1, 0.9), (2, 0.8), (3, 0.59), (4, 0.6)]
    indices = np.array([(t, 5) for t, _ in rows])
    weights = np.array([(w, 1 - w) for _, w in rows])
    indices[weights == 0] = -1
    exact = np.arange(len(rows)) == 3
    matrix = ProjectionMatrix(indices, weights, exact, teacher_vocab_size=6)
    assert as_dict(TokenPairs.relaxed(matrix, 8, 6, CPU)) == {3: 0, 4: 1, 2: 2, 7: 4}


def test_a_loser_takes_the_place_of_a_winner_beyond_the_size():
    indices, weights = np.array([[0], [0]]), np.ones((2, 1))
    matrix = ProjectionMatrix(indices, weights, np.array([False, True]), teacher_vocab_size=1)
    assert as_dict(TokenPairs.relaxed(matrix, 2, 1, CPU)) == {1: 0}
    assert as_dict(TokenPairs.relaxed(matrix, 1, 1, CPU)) == {0: 0}


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_value_equals_the_loop(kind, weights):
    student, teacher = logits(S, V + 2, 0), logits(T, W + 3, 1)
    chunks = tuple(side.tolist() for side in CHUNKS)
    pairs = oracle_chunks.relaxed_pairs(MATRIX)
    options = {"temperature": 1.6, "common_weight": 0.4, "uncommon_weight": 1.3, "uncommon_topk": 3}
    out = run(student, teacher, divergence=kind, chunk_size=2, **options, **weights)
    expected = oracle_chunks.paired(
        student.tolist(), teacher.tolist(), pairs, (V, W), chunks, kind, 1.6, 0.4, 1.3, 3, **weights
    )
    count = len(oracle.units(*chunks))
    assert out.loss.item() == pytest.approx(expected / count, rel=1e-11)
    assert out.metrics["kd"].count == count


def test_teacher_equal_to_student_is_exactly_zero_also_where_no_row_says_that_it_is_exact():
    student = logits(S, V, 0, torch.bfloat16).requires_grad_()
    matrix = ProjectionMatrix(np.arange(V)[:, None], np.ones((V, 1)))
    ids = torch.arange(S, dtype=torch.int32).expand(B, S)
    out = run(student, student.detach().clone(), matrix, (ids, ids), temperature=0.7)
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()


def test_with_exact_rows_alone_it_is_gold():
    kept = MATRIX.exact[:, None]
    matrix = ProjectionMatrix(
        np.where(kept, MATRIX.indices, -1), np.where(kept, MATRIX.weights, 0), MATRIX.exact, teacher_vocab_size=W
    )
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    assert torch.equal(run(student, teacher, matrix).loss, run(student, teacher, matrix, loss=gold).loss)
    assert not torch.equal(run(student, teacher).loss, run(student, teacher, loss=gold).loss)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"merge": "last"}, "merge='last'.*choose from first, mean"),
        ({"uncommon_topk": 0}, "uncommon_topk=0"),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        run(logits(S, V, 0), logits(T, W, 1), **wrong)


def test_a_matrix_without_a_heavy_entry_is_refused():
    matrix = ProjectionMatrix(np.array([[0, 1]] * V), np.full((V, 2), 0.5), teacher_vocab_size=W)
    with pytest.raises(ProjectionError, match="no matching tokens"):
        run(logits(S, V, 0), logits(T, W, 1), matrix)
