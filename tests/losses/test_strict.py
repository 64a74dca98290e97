import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.losses import same_vocab
from nemo_opd.losses.strict import strict, strict_units

from . import oracle, oracle_prefix
from .test_memory import bytes_saved

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


def every_token(positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    chunks = torch.arange(positions).expand(B, positions)
    return chunks, chunks


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


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize(("top_k", "rest"), SUPPORTS)
def test_gradient(kind, weights, top_k, rest):
    teacher, chunks, ids = logits(T, W, 1)[:1], [side[:1] for side in CHUNKS], [side[:1] for side in IDS]
    options = {"divergence": kind, "top_k": top_k, "rest": rest} | weights

    def loss(student):
        return run(student, teacher, MATRIX, chunks, ids, temperature=1.7, chunk_size=2, normalizer=4, **options).loss

    assert len(strict_units(*ids, *chunks, MATRIX)) > 2
    assert torch.autograd.gradcheck(loss, logits(S, V + 1, 0)[:1].requires_grad_())


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize("rest", [False, True])
def test_same_tokenizer_equals_same_vocab(kind, weights, rest):
    student, teacher = logits(S, V, 0).requires_grad_(), logits(S, V, 1)
    options = {"divergence": kind, "temperature": 1.4} | weights
    ids = (IDS[0], IDS[0])
    strictly = run(student, teacher, oracle_prefix.identity(V), every_token(S), ids, rest, **options).loss
    direct = same_vocab(student, teacher, mask=torch.ones(B, S), **options).loss
    torch.testing.assert_close(strictly, direct, rtol=1e-13, atol=0)
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (strictly, direct)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize(("top_k", "rest"), SUPPORTS)
def test_teacher_equal_to_student_is_exactly_zero(kind, weights, top_k, rest):
    student = logits(S, V, 0, torch.bfloat16).requires_grad_()
    some = oracle_prefix.matrix([(s, s) for s, _ in PAIRS], V, V)
    for matrix in (some, oracle_prefix.identity(V)):
        options = {"divergence": kind, "top_k": top_k, "rest": rest, "temperature": 0.7} | weights
        out = run(student, student.detach().clone(), matrix, every_token(S), (IDS[0],) * 2, **options)
        out.loss.backward()
        assert out.metrics["kd"].count > 0
        assert out.loss.item() == 0
        assert not student.grad.any()


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize(("top_k", "rest"), SUPPORTS)
def test_extreme_logits_are_finite(kind, weights, top_k, rest):
    student = (150 * logits(S, V, 0, torch.float32).sign()).requires_grad_()
    teacher = 150 * logits(T, W, 1, torch.float32).sign()
    out = run(student, teacher, divergence=kind, top_k=top_k, rest=rest, **weights)
    out.loss.backward()
    assert out.loss.isfinite()
    assert student.grad.isfinite().all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(oracle.KINDS), support=st.sampled_from(SUPPORTS))
def test_not_negative(seed, kind, support):
    """fp32 rounds log-ratios of at most 50 nats by 2^−24 of that."""
    name, weights = kind
    student, teacher = logits(S, V, seed, torch.float32), logits(T, W, seed // 2 + 1, torch.float32)
    loss = run(student, teacher, divergence=name, top_k=support[0], rest=support[1], **weights).loss
    assert loss.item() >= -3 * 50 * 2**-23


def test_invariant_to_chunks_microbatches_order_and_padding():
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    pad = torch.nn.functional.pad

    def settings_of(order, width, chunk_size, rows_per_call):
        z = pad(student[order], (0, 0, 0, width), value=7.0).requires_grad_()
        t = pad(teacher[order], (0, 0, 0, 2 * width), value=-3.0)
        widths = (width, 2 * width)
        chunks = [pad(side[order], (0, by), value=-1) for side, by in zip(CHUNKS, widths, strict=True)]
        ids = [pad(side[order], (0, by), value=1) for side, by in zip(IDS, widths, strict=True)]
        loss = sum(
            run(
                z[i:j],
                t[i:j],
                chunks=[side[i:j] for side in chunks],
                ids=[side[i:j] for side in ids],
                normalizer=5,
                chunk_size=chunk_size,
            ).loss
            for i, j in ((k, k + rows_per_call) for k in range(0, B, rows_per_call))
        )
        (gradient,) = torch.autograd.grad(loss, z)
        return loss, gradient[:, :S][torch.argsort(torch.tensor(order))]

    reference = settings_of([0, 1], 0, None, 2)
    for setting in (([0, 1], 0, 1, 2), ([0, 1], 0, 2, 1), ([1, 0], 0, None, 2), ([1, 0], 4, 2, 1)):
        torch.testing.assert_close(settings_of(*setting), reference, rtol=1e-12, atol=1e-15)


def test_no_unit_stays_connected():
    """Every chunk is aligned, but no realised pair is exact."""
    student = logits(S, V, 0).requires_grad_()
    out = run(student, logits(T, W, 1), ids=(torch.full_like(IDS[0], 1), IDS[1]))
    out.loss.backward()
    assert out.metrics["kd"].count == 0
    assert out.loss.item() == 0
    assert not student.grad.any()


@pytest.mark.parametrize("chunk_size", [16, None])
@pytest.mark.parametrize(("top_k", "rest"), SUPPORTS)
def test_saves_the_gradient_and_nothing_else(chunk_size, top_k, rest):
    def loss(student, teacher):
        positions, width = student.shape[1:]
        ids = (torch.zeros(B, positions, dtype=torch.long),) * 2
        options = {"top_k": top_k, "rest": rest, "chunk_size": chunk_size}
        return run(student, teacher, oracle_prefix.identity(width), every_token(positions), ids, **options).loss

    assert bytes_saved(loss) <= 1.1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_k": 0}, "top_k=0"),
        ({"normalization": "full"}, "normalization='full'.*choose from support, rest"),
        ({"divergence": "kl"}, "divergence='kl'"),
        ({"temperature": 0.0}, "temperature=0"),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    named = dict(zip(("student_ids", "teacher_ids", "student_chunk_id", "teacher_chunk_id"), IDS + CHUNKS, strict=True))
    with pytest.raises(ConfigError, match=message):
        strict(logits(S, V, 0), logits(T, W, 1), projection=MATRIX, **named, **wrong)


def test_a_projection_without_exact_pairs_is_refused():
    with pytest.raises(ProjectionError, match="none within 9 student and 11 teacher"):
        run(logits(S, V, 0), logits(T, W, 1), oracle_prefix.matrix([], V, W))
