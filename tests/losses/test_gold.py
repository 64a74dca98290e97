import numpy as np
import pytest
import torch

from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.losses.gold import gold
from nemo_opd.losses.sparse_projection import TokenPairs
from nemo_opd.projection import ProjectionMatrix

from . import oracle, oracle_chunks

B, S, T, V, W = 2, 7, 6, 12, 15
MATRIX = oracle_chunks.paired_matrix(V, W, 5, seed=0)
PAIRS = oracle_chunks.exact_pairs(MATRIX)
CHUNKS = oracle.random_chunk_ids(np.random.default_rng(3), B, S, T)
CHUNK_LISTS = tuple(side.tolist() for side in CHUNKS)
COUNT = len(oracle.units(*CHUNK_LISTS))


def logits(positions: int, width: int, seed: int, dtype=torch.float64, rows: int = B) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, positions, width, generator=generator, dtype=torch.float64)).to(dtype)


def run(student, teacher, matrix=MATRIX, chunks=CHUNKS, **options):
    ids = [torch.zeros_like(side, dtype=torch.long) for side in chunks]
    return gold(
        student,
        teacher,
        projection=matrix,
        student_ids=ids[0],
        teacher_ids=ids[1],
        student_chunk_id=chunks[0],
        teacher_chunk_id=chunks[1],
        **options,
    )


def identity(size: int, num_pairs: int) -> ProjectionMatrix:
    """One tokenizer with itself, of which only the last `num_pairs` tokens are known to be shared."""
    exact = np.arange(size) >= size - num_pairs
    indices = np.where(exact, np.arange(size), -1)[:, None]
    return ProjectionMatrix(indices, exact[:, None].astype(np.float32), exact, teacher_vocab_size=size)


def identity_chunks(positions: int = S) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(positions, dtype=torch.int32).expand(B, positions).contiguous()
    return ids, ids


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize(
    ("tau", "common", "uncommon", "top_k"), [(1.0, 1.0, 1.0, 8192), (2.5, 0.3, 1.7, 3), (0.8, 1.0, 0.0, 1)]
)
def test_value_equals_the_loop(kind, weights, tau, common, uncommon, top_k):
    """The rest cell, the tails over the whole vocabulary's mass, a tail cut, zero padding, τ² on both terms."""
    student, teacher = logits(S, V + 2, 0), logits(T, W + 3, 1)
    out = run(
        student,
        teacher,
        divergence=kind,
        temperature=tau,
        common_weight=common,
        uncommon_weight=uncommon,
        uncommon_topk=top_k,
        chunk_size=2,
        **weights,
    )
    expected = oracle_chunks.paired(
        student.tolist(), teacher.tolist(), PAIRS, (V, W), CHUNK_LISTS, kind, tau, common, uncommon, top_k, **weights
    )
    assert out.loss.item() == pytest.approx(expected / COUNT, rel=1e-11)
    assert out.metrics["kd"].value() == pytest.approx(expected / COUNT, rel=1e-11)
    assert out.metrics["kd"].count == COUNT


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_a_rest_on_one_side_only_is_dropped(kind, weights):
    """A rest cell that no student token can fill would make forward KL infinite; the tails still count."""
    matrix = ProjectionMatrix(
        MATRIX.indices[MATRIX.exact], MATRIX.weights[MATRIX.exact], np.ones(5, bool), teacher_vocab_size=W
    )
    student, teacher = logits(S, 5, 0), logits(T, W, 1)
    expected = oracle_chunks.paired(
        student.tolist(),
        teacher.tolist(),
        oracle_chunks.exact_pairs(matrix),
        (5, W),
        CHUNK_LISTS,
        kind,
        **weights,
    )
    out = run(student, teacher, matrix, divergence=kind, normalizer=1, **weights)
    assert out.loss.item() == pytest.approx(expected, rel=1e-11)


def test_extreme_logits_have_the_right_value():
    """1 − Σ of the pairs has no digit left for a rest of e^−300."""
    student, teacher = 150 * logits(S, V, 0).sign(), 150 * logits(T, W, 1).sign()
    student[:, 0, sorted(PAIRS)], student[:, 0, [s for s in range(V) if s not in PAIRS]] = 150, -150
    teacher[:, 0] = 0
    expected = oracle_chunks.paired(student.tolist(), teacher.tolist(), PAIRS, (V, W), CHUNK_LISTS, "forward_kl")
    loss = run(student.float(), teacher.float(), normalizer=1).loss
    assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_others_that_are_all_forbidden_are_finite(kind):
    """log-sum-exp of −inf alone has a NaN gradient."""
    student = logits(S, V, 0)
    student[..., : V - 4] = -torch.inf
    student.requires_grad_()
    teacher = student.detach().clone()
    teacher[..., -1] += 1
    out = run(student, teacher, identity(V, 4), identity_chunks(), divergence=kind)
    out.loss.backward()
    assert out.loss.isfinite()
    assert student.grad.isfinite().all()
    assert student.grad.any()


@pytest.mark.parametrize(("students", "teachers"), [(V, W), (V - 3, W - 4)])
def test_exact_pairs_are_those_within_the_sizes(students, teachers):
    """A pair is dropped when either token lies beyond its size; what remains is in no pair."""
    pairs = TokenPairs.exact(MATRIX, students, teachers, torch.device("cpu"))
    expected = {s: t for s, t in PAIRS.items() if s < students and t < teachers}
    assert dict(zip(pairs.student.tolist(), pairs.teacher.tolist(), strict=True)) == expected
    assert set(pairs.student_rest.tolist()) == set(range(students)) - set(expected)
    assert set(pairs.teacher_rest.tolist()) == set(range(teachers)) - set(expected.values())


def test_pairs_are_made_once_as_long_as_the_matrix_lives():
    matrix, device = identity(V, 4), torch.device("cpu")
    pairs = TokenPairs.exact(matrix, V, V, device)
    assert TokenPairs.exact(matrix, V, V, device) is pairs
    assert TokenPairs.relaxed(matrix, V, V, device) is not pairs
    again = identity(V, 3)
    del matrix
    assert len(TokenPairs.exact(again, V, V, device)) == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"merge": "last"}, "merge='last'.*choose from first, mean"),
        ({"common_weight": -1.0}, "common_weight=-1.0"),
        ({"uncommon_weight": float("nan")}, "uncommon_weight=nan"),
        ({"uncommon_topk": 0}, "uncommon_topk=0"),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        run(**({"student": logits(S, V, 0), "teacher": logits(T, W, 1)} | wrong))


def test_a_matrix_without_exact_rows_is_refused():
    matrix = ProjectionMatrix(MATRIX.indices, MATRIX.weights, teacher_vocab_size=W)
    with pytest.raises(ProjectionError, match="no matching tokens"):
        run(logits(S, V, 0), logits(T, W, 1), matrix)
