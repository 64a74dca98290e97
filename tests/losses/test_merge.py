import numpy as np
import pytest
import torch

from nemo_opd.losses import p_kl
from nemo_opd.losses.gold import gold, h_kl
from nemo_opd.projection import ProjectionMatrix

from . import oracle, oracle_chunks

B, S, T, V, W, TAU = 2, 9, 8, 8, 9, 1.6
PAIRED = oracle_chunks.paired_matrix(V, W, 4, seed=2)
PROJECTED = oracle.Matrix(PAIRED.indices, PAIRED.weights, V, W)
CHUNKS = oracle.random_chunk_ids(np.random.default_rng(3), B, S, T)
CHUNK_LISTS = tuple(side.tolist() for side in CHUNKS)
LOSSES = (p_kl, gold, h_kl)


def logits(positions: int, width: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(B, positions, width, generator=generator, dtype=torch.float64)).to(dtype)


def run(loss, student, teacher, matrix=PAIRED, chunks=CHUNKS, merge="mean", **options):
    ids = [torch.zeros_like(side, dtype=torch.long) for side in chunks]
    return loss(
        student,
        teacher,
        projection=matrix,
        student_ids=ids[0],
        teacher_ids=ids[1],
        student_chunk_id=chunks[0],
        teacher_chunk_id=chunks[1],
        merge=merge,
        **options,
    )


def means(student: torch.Tensor, teacher: torch.Tensor, arithmetic: bool, tau: float = TAU) -> tuple[list, list]:
    return (
        oracle_chunks.merged(student.tolist(), CHUNK_LISTS, 0, V, tau, arithmetic),
        oracle_chunks.merged(teacher.tolist(), CHUNK_LISTS, 1, W, tau, arithmetic=False),
    )


def test_the_chunks_have_several_positions_on_both_sides():
    sizes = oracle_chunks.lengths(*CHUNK_LISTS)
    assert max(m for m, _ in sizes) > 1
    assert max(n for _, n in sizes) > 1


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_p_kl_equals_the_loop(kind, weights):
    """The arithmetic mean of the student, the geometric of the teacher, both after the temperature and the cut."""
    student, teacher = logits(S, V + 2, 0), logits(T, W + 1, 1)
    expected = TAU**2 * oracle.p_kl(*means(student, teacher, True), PROJECTED, CHUNK_LISTS, kind, 1.0, 0.7, **weights)
    options = {"temperature": TAU, "coverage_coef": 0.7, "normalizer": 1}
    loss = run(p_kl, student, teacher, divergence=kind, chunk_size=2, **options, **weights).loss
    assert loss.item() == pytest.approx(expected, rel=1e-11)


def test_vocab_topk_looks_at_all_positions():
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    teacher[:, :, 0] -= 20
    unit, size = next(
        (unit, size)
        for unit, size in zip(oracle.units(*CHUNK_LISTS), oracle_chunks.lengths(*CHUNK_LISTS), strict=True)
        if size[1] > 1
    )
    covered = sorted({t for row in PROJECTED.rows() for t in row})
    teacher[unit[0], unit[2] + size[1] - 1, covered[0]] += 50
    compared = [
        teacher[b, j + k].tolist()
        for (b, _, j), (_, n) in zip(oracle.units(*CHUNK_LISTS), oracle_chunks.lengths(*CHUNK_LISTS), strict=True)
        for k in range(n)
    ]
    kept = oracle_chunks.most_important(PROJECTED, compared, 2)
    assert covered[0] in kept
    expected = oracle_chunks.p_kl_top_k(
        *means(student, teacher, True, 1.0), PROJECTED, CHUNK_LISTS, "forward_kl", 1.0, 1.0, kept
    )
    loss = run(p_kl, student, teacher, vocab_topk=2, normalizer=1).loss
    assert loss.item() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize(("loss", "pairs"), [(gold, oracle_chunks.exact_pairs), (h_kl, oracle_chunks.relaxed_pairs)])
def test_gold_and_h_kl_equal_the_loop(loss, pairs, kind, weights):
    student, teacher = logits(S, V + 2, 0), logits(T, W + 1, 1)
    expected = TAU**2 * oracle_chunks.paired(
        *means(student, teacher, False), pairs(PAIRED), (V, W), CHUNK_LISTS, kind, **weights
    )
    out = run(loss, student, teacher, divergence=kind, temperature=TAU, normalizer=1, chunk_size=2, **weights)
    assert out.loss.item() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_of_one_token_a_side_are_as_with_first(loss):
    student, teacher = logits(S, V, 0), logits(S, W, 1)
    ids = torch.arange(S, dtype=torch.int32).expand(B, S)
    values = [run(loss, student, teacher, chunks=(ids, ids), merge=merge).loss for merge in ("first", "mean")]
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_extreme_and_forbidden_logits_are_finite(loss):
    """A token that is −inf in every position of a chunk has a NaN gradient in a plain log of a mean."""
    student = 150 * logits(S, V, 0, torch.float32).sign()
    teacher = 150 * logits(T, W, 1, torch.float32).sign()
    out = run(loss, student.requires_grad_(), teacher)
    out.loss.backward()
    assert out.loss.isfinite()
    assert student.grad.isfinite().all()
    forbidden = logits(S, V, 0, torch.float32)
    forbidden[..., 0] = -torch.inf
    matrix = ProjectionMatrix(np.arange(V)[:, None], np.ones((V, 1)), np.ones(V, bool))
    same = tuple(CHUNKS[0] for _ in range(2))
    out = run(loss, forbidden.requires_grad_(), forbidden.detach() * 0.9, matrix, same)
    out.loss.backward()
    assert out.loss.isfinite()
    assert forbidden.grad.isfinite().all()
