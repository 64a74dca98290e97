"""The embedding generator against float64 loops, and for spaces with a known rotation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_opd.alignment import pieces_of
from nemo_opd.errors import ProjectionError
from nemo_opd.projection import (
    EmbeddingSource,
    ProjectionMatrix,
    add_embeddings,
    build_projection,
    embedding,
    exact_map,
)
from tests.projection.conftest import SMALL

STUDENT, TEACHER = SMALL["three_digits"], SMALL["one_digit"]
WIDTHS = [(12, 12), (20, 12), (12, 20)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def matrix() -> ProjectionMatrix:
    return build_projection(STUDENT, TEACHER, top_k=2)


def latents(tokenizer: object) -> np.ndarray:
    """Return vectors [ids, 12] that are equal for equal bytes in every tokenizer."""
    rows = [np.random.default_rng([1, *piece]).normal(size=12) for piece in pieces_of(tokenizer).as_list()]
    return np.stack(rows)


def orthonormal(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(max(rows, columns), rows)))[0].T[:, :columns]


def embeddings(student_width: int, teacher_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents, rotated and shifted differently for student and teacher; the head's padding is huge."""
    sides = []
    for tokenizer, width, seed in ((STUDENT, student_width, 3), (TEACHER, teacher_width, 4)):
        rotated = latents(tokenizer) @ orthonormal(12, width, seed) + seed
        sides.append(torch.from_numpy(np.concatenate([rotated, np.full((5, width), 1e6)])).float())
    return sides[0], sides[1]


@pytest.mark.parametrize("widths", WIDTHS)
def test_a_rotation_between_the_spaces_is_found(matrix: ProjectionMatrix, widths: tuple[int, int]) -> None:
    """Catches a transposed map: a row must get the teacher token that it is nearest to by construction."""
    student_VD, teacher_WE = embeddings(*widths)
    rows = np.flatnonzero(~matrix.exact & (pieces_of(STUDENT).lengths > 0))
    targets = np.flatnonzero(pieces_of(TEACHER).lengths > 0)[: len(rows)]
    student_VD[rows] = torch.from_numpy(latents(TEACHER)[targets] @ orthonormal(12, widths[0], 3) + 3).float()
    start = exact_map(STUDENT, TEACHER)
    matched = add_embeddings(start, STUDENT, TEACHER, student_VD, teacher_WE, weight=1, temperature=0.01, width=1)
    assert matched.indices[rows, 0].tolist() == targets.tolist()
    assert (matched.options.embedding_anchors, matched.options.embedding_weight) == (anchors(start).shape[0], 1)


def anchors(matrix: ProjectionMatrix) -> np.ndarray:
    student_pieces = pieces_of(STUDENT)
    return np.array([(s, t) for s, t in matrix.shared_pairs.tolist() if student_pieces.lengths[s]])


def expected_row(matrix: ProjectionMatrix, row: int, settings: EmbeddingSource) -> dict[int, float]:
    """Return a row for equal widths: Procrustes as one rotation of the student's space, one cosine at a time."""
    student, teacher = settings.student.double().numpy(), settings.teacher.double().numpy()
    pairs = anchors(matrix)
    centre, teacher_centre = student[pairs[:, 0]].mean(axis=0), teacher[pairs[:, 1]].mean(axis=0)
    covariance = sum(np.outer(unit(student[s] - centre), unit(teacher[t] - teacher_centre)) for s, t in pairs)
    u, _, vt = np.linalg.svd(covariance)
    turned = (student[row] - centre) @ (u @ vt)
    texts = [t for t, piece in enumerate(pieces_of(TEACHER).as_list()) if piece]
    cosines = sorted(((float(unit(turned) @ unit(teacher[t] - teacher_centre)), t) for t in texts), reverse=True)
    shares = {t: np.exp(cosine / settings.temperature) for cosine, t in cosines[: settings.width]}
    mass = {t: w for t, w in zip(matrix.indices[row].tolist(), matrix.weights[row].tolist(), strict=True) if t >= 0}
    for t, share in shares.items():
        mass[t] = mass.get(t, 0.0) + settings.weight * share / sum(shares.values())
    return {t: w / sum(mass.values()) for t, w in mass.items()}


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_rows_against_loops(matrix: ProjectionMatrix) -> None:
    """Catches wrong weights, and changed exact, special or empty rows. Noise keeps cosines away from 0 and 1."""
    student, teacher = embeddings(12, 12)
    student = student + 0.5 * torch.randn(student.shape, generator=torch.Generator().manual_seed(0))
    settings = EmbeddingSource(student, teacher, weight=0.3, temperature=0.2, width=3)
    mixed = add_embeddings(matrix, STUDENT, TEACHER, student, teacher, weight=0.3, temperature=0.2, width=3)
    changed = np.flatnonzero(~matrix.exact & (pieces_of(STUDENT).lengths > 0))
    assert len(changed) > 30
    for row in changed[::3].tolist():
        entries = zip(mixed.indices[row].tolist(), mixed.weights[row].tolist(), strict=True)
        # float32 cosines of 12 terms, sharpened by 1 / 0.2
        assert {t: w for t, w in entries if t >= 0} == pytest.approx(expected_row(matrix, row, settings), abs=1e-5)
        assert (np.diff(mixed.weights[row]) <= 0).all()
    unchanged = np.setdiff1d(np.arange(matrix.student_vocab_size), changed)
    assert np.array_equal(mixed.indices[unchanged, :2], matrix.indices[unchanged])
    assert np.array_equal(mixed.weights[unchanged, :2], matrix.weights[unchanged])
    assert (mixed.indices[unchanged, 2:] == -1).all()


def test_block_size_changes_nothing(matrix: ProjectionMatrix, monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = embeddings(20, 12)
    settings = {"weight": 0.3, "temperature": 0.1, "width": 3}
    expected = add_embeddings(matrix, STUDENT, TEACHER, student, teacher, **settings)
    monkeypatch.setattr(embedding, "_BLOCK_CELLS", 1000)
    seen: list[tuple[int, int]] = []
    parts = add_embeddings(
        matrix, STUDENT, TEACHER, student, teacher, **settings, progress=lambda *done: seen.append(done)
    )
    assert np.array_equal(expected.indices, parts.indices)
    assert expected.weights == pytest.approx(parts.weights, abs=1e-6)
    assert len(seen) > 10
    assert seen[-1][0] == seen[-1][1]


def test_a_build_with_embeddings() -> None:
    student, teacher = embeddings(20, 12)
    built = build_projection(STUDENT, TEACHER, 3, embeddings=EmbeddingSource(student, teacher))
    assert built.top_k == 3
    assert built.options.passes[1:4] == ("multi_token", "embedding", "sort_and_cut")
    plain = build_projection(STUDENT, TEACHER, 3)
    assert np.array_equal(built.indices[built.exact], plain.indices[plain.exact])
    assert not np.array_equal(built.indices, plain.indices)


def test_bfloat16_is_read_as_it_is(matrix: ProjectionMatrix) -> None:
    student, teacher = (side.bfloat16() for side in embeddings(12, 12))
    settings = {"weight": 0.3, "temperature": 0.1, "width": 3}
    half = add_embeddings(matrix, STUDENT, TEACHER, student, teacher, **settings)
    full = add_embeddings(matrix, STUDENT, TEACHER, student.float(), teacher.float(), **settings)
    assert np.array_equal(half.indices, full.indices)


GOOD = EmbeddingSource(*embeddings(12, 12))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (replace(GOOD, student=GOOD.student[:100]), r"the student's embeddings are torch.float32 \(100, 12\)"),
        (replace(GOOD, teacher=GOOD.teacher[0]), r"the teacher's embeddings are torch.float32 \(12,\)"),
        (replace(GOOD, teacher=GOOD.teacher.int()), "the teacher's embeddings are torch.int32"),
        (replace(GOOD, teacher=GOOD.teacher[:, :0]), "the teacher's embeddings"),
        (replace(GOOD, student=GOOD.student.index_fill(0, torch.tensor([17]), torch.nan)), "row 17 of the student's"),
        (replace(GOOD, teacher=GOOD.teacher.index_fill(0, torch.tensor([3]), torch.inf)), "row 3 of the teacher's"),
        (replace(GOOD, weight=0.0), "embedding weight is 0.0"),
        (replace(GOOD, temperature=float("nan")), "embedding temperature is nan"),
        (replace(GOOD, width=0), "embedding width is 0"),
        (EmbeddingSource(torch.randn(700, 2000), torch.randn(700, 3000)), "dimensions takes 2000"),
    ],
)
def test_refused(source: EmbeddingSource, reason: str) -> None:
    with pytest.raises(ProjectionError, match=reason):
        build_projection(STUDENT, TEACHER, embeddings=source)


def test_padded_rows_of_the_head_may_be_anything() -> None:
    """Bug: rows beyond the tokenizer must be finite although they are not read."""
    student = torch.cat([GOOD.student, torch.full((1, 12), torch.nan)])
    assert build_projection(STUDENT, TEACHER, embeddings=replace(GOOD, student=student)).exact.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(matrix: ProjectionMatrix) -> None:
    settings = {"weight": 0.3, "temperature": 0.2, "width": 3}
    student, teacher = embeddings(20, 12)
    here = add_embeddings(matrix, STUDENT, TEACHER, student, teacher, **settings)
    there = add_embeddings(matrix, STUDENT, TEACHER, student, teacher.cuda(), **settings, device="cuda")
    assert np.array_equal(here.indices, there.indices)
    assert here.weights == pytest.approx(there.weights, abs=1e-5)
