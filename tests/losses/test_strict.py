import pytest
import torch

from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.losses.alm import alm
from nemo_opd.losses.strict import strict, strict_units

from . import oracle, oracle_prefix

B, S, T, V, W = 2, 12, 12, 9, 11
PAIRS = [(0, 3), (2, 0), (3, 7), (6, 10), (8, 1)]
MATRIX = oracle_prefix.matrix(PAIRS, V, W)
CHUNKS = (
    torch.tensor([[0, 1, 2, 3, 3, 4, 5, 6, -1, 7, 8, 9], [-1, 0, 1, 2, 3, 4, 5, 5, 6, 8, -1, -1]]),
    torch.tensor([[0, 1, 2, 3, 4, 4, 5, 6, 7, -1, 8, 9], [0, 1, 2, 3, -1, 4, 5, 6, 6, 7, 8, -1]]),
)
LISTS = tuple(side.tolist() for side in CHUNKS)


def realised() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that pair in two of three chunks."""
    student, teacher = torch.full((B, S), 1), torch.full((B, T), 2)
    for k, chunk in enumerate(oracle_prefix.chunks_of(*LISTS)):
        s, t = PAIRS[k % len(PAIRS)]
        student[chunk.b, chunk.student] = s
        teacher[chunk.b, chunk.teacher] = t if k % 3 else PAIRS[(k + 1) % len(PAIRS)][1]
    return student, teacher


IDS = realised()
ID_LISTS = tuple(side.tolist() for side in IDS)
SUPPORTS = [(None, False), (None, True), (2, False), (2, True), (9, False)]


def logits(positions: int, width: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(B, positions, width, generator=generator, dtype=torch.float64)).to(dtype)


def run(student, teacher, matrix=MATRIX, chunks=CHUNKS, ids=IDS, rest=False, **options):
    return strict(
        student,
        teacher,
        projection=matrix,
        student_ids=ids[0],
        teacher_ids=ids[1],
        student_chunk_id=chunks[0],
        teacher_chunk_id=chunks[1],
        normalization="rest" if rest else "support",
        **options,
    )


def expected(student, teacher, pairs=PAIRS, **options):
    return oracle_prefix.strict(student.tolist(), teacher.tolist(), ID_LISTS, pairs, LISTS, **options)


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize("tau", [1.0, 2.5])
@pytest.mark.parametrize(("top_k", "rest"), SUPPORTS)
def test_value_equals_the_loop(kind, weights, tau, top_k, rest):
    """Which chunks count, partners in the same order on both sides, top-k of the student only, each side's rest."""
    student, teacher = logits(S, V + 2, 0), logits(T, W + 3, 1)
    options = {"top_k": top_k, "rest": rest} | weights
    out = run(student, teacher, divergence=kind, temperature=tau, chunk_size=2, **options)
    total, count = expected(student[..., :V], teacher[..., :W], kind=kind, tau=tau, **options)
    assert 3 <= count < len(list(oracle_prefix.chunks_of(*LISTS)))
    assert out.metrics["kd"].count == count
    assert out.loss.item() == pytest.approx(total / count, rel=1e-12)
    assert out.metrics["kd"].value() == pytest.approx(total / count, rel=1e-12)


def test_units_are_what_the_loss_counts():
    units = strict_units(*IDS, *CHUNKS, MATRIX)
    found = [
        (chunk.b * S + chunk.student[0] - 1, chunk.b * T + chunk.teacher[0] - 1)
        for chunk in oracle_prefix.chunks_of(*LISTS)
        if len(chunk.student) == len(chunk.teacher) == 1
        and (ID_LISTS[0][chunk.b][chunk.student[0]], ID_LISTS[1][chunk.b][chunk.teacher[0]]) in PAIRS
    ]
    assert list(zip(units.student_rows.tolist(), units.teacher_rows.tolist(), strict=True)) == found
    assert len(units) == run(logits(S, V, 0), logits(T, W, 1)).metrics["kd"].count


@pytest.mark.parametrize("every", ["student", "teacher"])
@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_a_rest_cell_of_one_side_is_dropped(every, kind, weights):
    """A side whose every token is shared has nothing else: the cell would be infinite for some divergence."""
    widths = (len(PAIRS), W) if every == "student" else (V, len(PAIRS))
    pairs = (
        [(i, t) for i, (_, t) in enumerate(PAIRS)] if every == "student" else [(s, i) for i, (s, _) in enumerate(PAIRS)]
    )
    ids = (torch.full_like(IDS[0], pairs[0][0]), torch.full_like(IDS[1], pairs[0][1]))
    student, teacher = logits(S, widths[0], 0), logits(T, widths[1], 1)
    matrix = oracle_prefix.matrix(pairs, *widths)
    out = run(student, teacher, matrix, ids=ids, rest=True, divergence=kind, normalizer=1, **weights)
    lists = (student.tolist(), teacher.tolist(), tuple(side.tolist() for side in ids))
    total, _ = oracle_prefix.strict(*lists, pairs, LISTS, kind, 1.0, **weights)
    assert out.loss.item() == pytest.approx(total, rel=1e-12)


def test_no_unit_stays_connected():
    """Every chunk is aligned, but no realised pair is exact."""
    student = logits(S, V, 0).requires_grad_()
    out = run(student, logits(T, W, 1), ids=(torch.full_like(IDS[0], 1), IDS[1]))
    out.loss.backward()
    assert out.metrics["kd"].count == 0
    assert out.loss.item() == 0
    assert not student.grad.any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_k": 0}, "top_k=0"),
        ({"normalization": "full"}, "normalization='full'.*choose from support, rest"),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    named = dict(zip(("student_ids", "teacher_ids", "student_chunk_id", "teacher_chunk_id"), IDS + CHUNKS, strict=True))
    with pytest.raises(ConfigError, match=message):
        strict(logits(S, V, 0), logits(T, W, 1), projection=MATRIX, **named, **wrong)


def test_a_projection_without_exact_pairs_is_refused():
    with pytest.raises(ProjectionError, match="no matching tokens within 9 student and 11 teacher"):
        run(logits(S, V, 0), logits(T, W, 1), oracle_prefix.matrix([], V, W))


def test_chunks_of_several_tokens_are_units_where_they_have_a_weight():
    """Bug: their sum divided by the number of exact pairs, of which a text of longer chunks has none."""
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    weight, plain = 0.5, run(student, teacher).metrics["kd"]
    ids = {"student_ids": IDS[0], "teacher_ids": IDS[1]}
    several = [chunk for chunk in oracle_prefix.chunks_of(*LISTS) if len(chunk.student) + len(chunk.teacher) > 2]
    only_longer = [torch.full_like(side, -1) for side in CHUNKS]
    for chunk in several:
        for kept, side, places in zip(only_longer, CHUNKS, (chunk.student, chunk.teacher), strict=True):
            kept[chunk.b, places] = side[chunk.b, places]
    chunks = {"student_chunk_id": only_longer[0], "teacher_chunk_id": only_longer[1]}
    longer = alm(student, teacher, **ids, **chunks, temperature=1.0)
    total = float(plain.total) + weight * float(longer.metrics["kd"].total)
    out = run(student, teacher, continuation_weight=weight)
    assert out.metrics["kd"].count == plain.count + len(several) > plain.count
    assert out.loss.item() == pytest.approx(total / (plain.count + len(several)), rel=1e-12)
    assert run(student, teacher, continuation_weight=weight, normalizer=7).loss.item() == pytest.approx(
        total / 7, rel=1e-12
    )
