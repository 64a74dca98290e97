from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.losses.cells import CommonCells
from nemo_opd.losses.shared_prefix import shared_prefix

from . import oracle, oracle_prefix

B, S, T, V, W = 2, 7, 6, 9, 11
PAIRS = [(0, 3), (2, 0), (3, 7), (6, 10), (8, 1)]
STUDENT_MAP = [0, 1, 1, 2, -1, 2, 3, 0, 4]
"""Cell 1 of several students, token 4 in the rest cell."""
TEACHER_MAP = [1, 4, 1, 0, 0, -1, -1, 2, 4, 4, 3]
MATRIX = oracle_prefix.matrix(PAIRS, V, W, STUDENT_MAP, TEACHER_MAP)
CHUNKS = oracle.random_chunk_ids(np.random.default_rng(3), B, S, T)
LISTS = tuple(side.tolist() for side in CHUNKS)


def logits(positions: int, width: int, seed: int, dtype=torch.float64, rows: int = B) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, positions, width, generator=generator, dtype=torch.float64)).to(dtype)


def run(student, teacher, matrix=MATRIX, chunks=CHUNKS, **options):
    return shared_prefix(
        student,
        teacher,
        projection=matrix,
        student_ids=torch.zeros_like(chunks[0], dtype=torch.long),
        teacher_ids=torch.zeros_like(chunks[1], dtype=torch.long),
        student_chunk_id=chunks[0],
        teacher_chunk_id=chunks[1],
        **options,
    )


def every_token(positions: int = S, rows: int = B) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(positions, dtype=torch.int32).expand(rows, positions).contiguous()
    return ids, ids


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize("tau", [1.0, 2.5])
def test_value_equals_the_loop(kind, weights, tau):
    """The predictors of both sides, wider heads, which map is whose, the rest cell and τ²."""
    student, teacher = logits(S, V + 2, 0), logits(T, W + 3, 1)
    out = run(student, teacher, divergence=kind, temperature=tau, chunk_size=2, **weights)
    maps = (STUDENT_MAP, TEACHER_MAP)
    expected = oracle_prefix.shared_prefix(student.tolist(), teacher.tolist(), maps, LISTS, kind, tau, **weights)
    assert out.metrics["kd"].count == 5
    # Sums of at most 11 positive float64 numbers, and logarithms of numbers far from 1.
    assert out.loss.item() == pytest.approx(expected / 5, rel=1e-12)
    assert out.metrics["kd"].value() == pytest.approx(expected / 5, rel=1e-12)


def test_pieces_choose_the_maps():
    """Catches maps by longest prefix in place of spellings, and a name that is not checked."""
    spelling = [0, 2, 1, 4, 4, 2, 3, 0, 4], [3, 4, 1, 0, 2, -1, 0, 2, 4, 4, 3]
    matrix = replace(MATRIX, student_shared_spelling=spelling[0], teacher_shared_spelling=spelling[1])
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    lists = student.tolist(), teacher.tolist()
    for pieces, maps in (("spelling", spelling), ("longest_prefix", (STUDENT_MAP, TEACHER_MAP))):
        expected = oracle_prefix.shared_prefix(*lists, maps, LISTS, "forward_kl", 1.0)
        assert run(student, teacher, matrix, pieces=pieces).loss.item() == pytest.approx(expected / 5, rel=1e-12)
    with pytest.raises(ProjectionError, match="pieces=spelling needs"):
        run(student, teacher, pieces="spelling")
    with pytest.raises(ConfigError, match="pieces='words' is unknown"):
        run(student, teacher, pieces="words")


@pytest.mark.parametrize("one_sided", ["student", "teacher"])
@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_a_rest_cell_of_one_side_is_dropped(one_sided, kind, weights):
    """Kept, it is infinite for some divergence and direction."""
    maps = {"student": (STUDENT_MAP, [max(c, 0) for c in TEACHER_MAP])}
    maps["teacher"] = ([max(c, 0) for c in STUDENT_MAP], TEACHER_MAP)
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    out = run(
        student,
        teacher,
        oracle_prefix.matrix(PAIRS, V, W, *maps[one_sided]),
        divergence=kind,
        normalizer=1,
        **weights,
    )
    lists = (student.tolist(), teacher.tolist())
    expected = oracle_prefix.shared_prefix(*lists, maps[one_sided], LISTS, kind, 1.0, **weights)
    assert out.loss.item() == pytest.approx(expected, rel=1e-12)


def test_a_shared_token_beyond_a_smaller_vocabulary_is_no_cell():
    """The teacher's token 10 is the only one of cell 3; kept, the teacher would give it probability 0."""
    student, teacher = logits(S, V, 0), logits(T, W - 1, 1)
    out = run(student, teacher, teacher_vocab_size=W - 1, normalizer=1)
    maps = (STUDENT_MAP, TEACHER_MAP[:-1])
    expected = oracle_prefix.shared_prefix(student.tolist(), teacher.tolist(), maps, LISTS, "forward_kl", 1.0)
    assert out.loss.item() == pytest.approx(expected, rel=1e-12)


def test_gradient_of_forward_kl_is_the_closed_form():
    """∂/∂z_s = p_s (1 − Q(x)/P(x))/τ at x = Ψ_S(s) (methods.md §5.8), times τ²."""
    tau = 1.3
    student, teacher = logits(2, V, 0, rows=1).requires_grad_(), logits(2, W, 1, rows=1)
    run(student, teacher, chunks=every_token(2, 1), temperature=tau).loss.backward()
    p = oracle.softmax(student[0, 0].tolist(), tau)
    of_student = oracle_prefix.pushed(p, STUDENT_MAP)
    of_teacher = oracle_prefix.pushed(oracle.softmax(teacher[0, 0].tolist(), tau), TEACHER_MAP)
    expected = [tau * p_s * (1 - of_teacher[x] / of_student[x]) for p_s, x in zip(p, STUDENT_MAP, strict=True)]
    np.testing.assert_allclose(student.grad[0, 0], expected, rtol=1e-10, atol=1e-14)
    assert not student.grad[0, 1].any()


def test_extreme_logits_have_the_right_value():
    student, teacher = 150 * logits(S, V, 0).sign(), 150 * logits(T, W, 1).sign()
    maps = (STUDENT_MAP, TEACHER_MAP)
    expected = oracle_prefix.shared_prefix(student.tolist(), teacher.tolist(), maps, LISTS, "forward_kl", 1.0)
    assert run(student.float(), teacher.float(), normalizer=1).loss.item() == pytest.approx(expected, rel=1e-6)


def test_maps_are_brought_to_a_device_once_and_let_go_with_the_matrix():
    matrix = oracle_prefix.matrix(PAIRS, V, W, STUDENT_MAP, TEACHER_MAP)

    def cells(of):
        return CommonCells.of(of.student_shared_prefix, of.teacher_shared_prefix, V, W, torch.device("cpu"))

    made = cells(matrix)
    assert cells(matrix) is made
    other = oracle_prefix.matrix(PAIRS, V, W, STUDENT_MAP, TEACHER_MAP)
    assert cells(other) is not made


def test_a_projection_without_the_maps_names_the_pass():
    with pytest.raises(ProjectionError, match="add_shared_prefix"):
        run(logits(S, V, 0), logits(T, W, 1), oracle_prefix.matrix(PAIRS, V, W))


def test_a_map_to_the_rest_cell_only_is_refused():
    nothing = oracle_prefix.matrix([], V, W, [-1] * V, [-1] * W)
    with pytest.raises(ProjectionError, match="no common cell within 9 student and 11 teacher"):
        run(logits(S, V, 0), logits(T, W, 1), nothing)
