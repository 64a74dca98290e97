import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.errors import ProjectionError
from nemo_opd.losses import same_vocab
from nemo_opd.losses.byte_prefix import PrefixRanges, byte_prefix

from . import oracle, oracle_prefix
from .test_memory import bytes_saved

B, S, T = 2, 9, 13
STUDENT = [b"a", b"b", b"c", b"ab", b"abc", b"cab", b"bb", None, b"cc"]
TEACHER = [b"ab", b"b", b"c", b"a", b"ca", b"bc", b"cb", None, b"cab", b"bca", b"b"]
V, W = len(STUDENT), len(TEACHER)
PHI = [3, 1, 2, 0, 2, 1, 2, -1, 5, 1, 1]
"""Students 4 (abc), 6 (bb), 7 and 8 (cc) are not reached."""
MATRIX = oracle_prefix.matrix([], V, W, byte_prefix=PHI, teacher=TEACHER)
CHUNKS = (
    torch.tensor([[-1, 0, 1, 2, 3, 3, 4, 5, 6], [-1, 0, 1, 2, 3, 4, -1, -1, -1]]),
    torch.tensor([[-1, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 6], [-1, 0, 0, 0, 1, 1, 2, 2, 3, -1, 4, 4, -1]]),
)
IDS = (
    torch.tensor([[0, 0, 4, 5, 0, 6, 4, 2, 3], [0, 5, 3, 6, 2, 8, 0, 0, 0]]),
    torch.tensor([[0, 3, 0, 2, 4, 1, 0, 1, 3, 1, 2, 2, 0], [0, 2, 3, 1, 3, 10, 1, 1, 2, 0, 2, 2, 0]]),
)
"""Row 0: a, abc = ab·c, cab = ca·b, a·bb = ab·b, abc = a·b·c, c, ab.
Row 1: cab = c·a·b, ab = a·b, bb = b·b, c, cc = c·c.

The b of the teacher's last ab is its second one, token 10."""
LISTS, ID_LISTS = (tuple(side.tolist() for side in sides) for sides in (CHUNKS, IDS))
COUNT = len(list(oracle_prefix.chunks_of(*LISTS)))


def logits(positions: int, width: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(B, positions, width, generator=generator, dtype=torch.float64)).to(dtype)


def run(student, teacher, matrix=MATRIX, chunks=CHUNKS, ids=IDS, **options):
    return byte_prefix(
        student,
        teacher,
        projection=matrix,
        student_ids=ids[0],
        teacher_ids=ids[1],
        student_chunk_id=chunks[0],
        teacher_chunk_id=chunks[1],
        **options,
    )


def expected(student, teacher, phi=PHI, **options):
    return oracle_prefix.byte_prefix(student.tolist(), teacher.tolist(), ID_LISTS, phi, TEACHER, LISTS, **options)


def same_tokenizer(width: int = V, positions: int = S) -> dict:
    chunks = (torch.arange(positions).expand(B, positions),) * 2
    ids = (torch.arange(positions).expand(B, positions) % width,) * 2
    return {"matrix": oracle_prefix.identity(width), "chunks": chunks, "ids": ids}


def test_the_chunks_are_of_equal_bytes():
    for chunk in oracle_prefix.chunks_of(*LISTS):
        student = b"".join(STUDENT[ID_LISTS[0][chunk.b][i]] for i in chunk.student)
        assert student == b"".join(TEACHER[ID_LISTS[1][chunk.b][j]] for j in chunk.teacher)


@pytest.mark.parametrize("seed", range(5))
def test_ranges_equal_the_loop(seed):
    """Equal bytes under several ids, tokens without bytes, prefixes of prefixes."""
    rng = np.random.default_rng(seed)
    strings = [b"".join(parts) for n in range(4) for parts in itertools.product([b"a", b"b", b"\xff"], repeat=n)]
    pieces = [None if i < 0 else strings[i] for i in rng.integers(-1, len(strings), size=60)]
    matrix = oracle_prefix.matrix([], 1, 60, byte_prefix=[-1] * 60, teacher=pieces)
    size = 60 - 15 * (seed % 2)
    ranges = PrefixRanges.of(matrix, size, torch.device("cpu"))
    pieces = pieces[:size]
    assert torch.equal(ranges.order[ranges.place], torch.arange(size))
    for token, piece in enumerate(pieces):
        found = set(ranges.order[ranges.begin[token] : ranges.end[token]].tolist())
        assert found == {t for t in range(size) if oracle_prefix.begins(piece, pieces[t], t == token)}


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize("tau", [1.0, 2.5])
def test_value_equals_the_loop(kind, weights, tau):
    """u, its rest cell, the bound of 1:n chunks at every place that it can come from and go to, and τ²."""
    student, teacher = logits(S, V + 2, 0), logits(T, W + 3, 1)
    out = run(student, teacher, divergence=kind, temperature=tau, chunk_size=2, **weights)
    total = expected(student[..., :V], teacher[..., :W], kind=kind, tau=tau, **weights)
    assert out.metrics["kd"].count == COUNT == 12
    # The oracle subtracts the bound from a mass; what is left is above 1e-3 of it here.
    assert out.loss.item() == pytest.approx(total / COUNT, rel=1e-10)
    assert out.metrics["kd"].value() == pytest.approx(total / COUNT, rel=1e-10)


@pytest.mark.parametrize(
    "phi",
    [
        [0 if v < 0 else v for v in PHI],
        [4, 6, 7, 0, 2, 1, 3, 8, 5, 1, 1],
        [4, 6, 7, 0, 2, 1, 3, -1, 5, 1, 1],
    ],
)
@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_a_rest_cell_of_one_side_is_dropped(phi, kind, weights):
    """The teacher has no rest; neither has one; and the student's rest is one token, which can be the realised one."""
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    out = run(
        student, teacher, oracle_prefix.matrix([], V, W, byte_prefix=phi, teacher=TEACHER), divergence=kind, **weights
    )
    total = expected(student, teacher, phi, kind=kind, tau=1.0, **weights)
    assert out.loss.item() == pytest.approx(total / COUNT, rel=1e-10)


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_gradient(kind, weights):
    teacher = logits(T, W, 1)

    def loss(student):
        return run(student, teacher, divergence=kind, temperature=1.7, chunk_size=5, normalizer=4, **weights).loss

    assert torch.autograd.gradcheck(loss, logits(S, V + 1, 0).requires_grad_())


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_same_tokenizer_equals_same_vocab(kind, weights):
    student, teacher = logits(S, V, 0).requires_grad_(), logits(S, V, 1)
    options = {"divergence": kind, "temperature": 1.4} | weights
    pushed = run(student, teacher, **same_tokenizer(), **options).loss
    direct = same_vocab(student, teacher, mask=torch.ones(B, S), **options).loss
    torch.testing.assert_close(pushed, direct, rtol=1e-13, atol=0)
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (pushed, direct)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_teacher_equal_to_student_is_exactly_zero(kind, weights):
    student = logits(S, V, 0, torch.bfloat16).requires_grad_()
    options = {"divergence": kind, "temperature": 0.7} | weights
    out = run(student, student.detach().clone(), **same_tokenizer(), **options)
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_extreme_logits_are_finite(kind, weights, seed):
    """Where the bound takes all of u(φ(y_1)), a difference would leave 0, which the reverse KL cannot take."""
    student = (150 * logits(S, V, seed, torch.float32).sign()).requires_grad_()
    out = run(student, 150 * logits(T, W, seed + 9, torch.float32).sign(), divergence=kind, **weights)
    out.loss.backward()
    assert out.loss.isfinite()
    assert student.grad.isfinite().all()


def test_a_certain_continuation_leaves_what_the_others_had():
    """R = 1 − e^−300: u(φ(y_1)) keeps e^−300 of q(y_1), and the reverse KL says so."""
    student, teacher = logits(S, V, 0), torch.zeros(B, T, W)
    teacher.scatter_(2, torch.cat([IDS[1][:, 1:], IDS[1][:, :1]], 1).unsqueeze(2), 300.0)
    loss = run(student.float(), teacher, divergence="reverse_kl").loss
    assert 100 < loss.item() < 700


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(oracle.KINDS))
def test_not_negative(seed, kind):
    """fp32 rounds log-ratios of at most 50 nats by 2^−24 of that."""
    name, weights = kind
    student, teacher = logits(S, V, seed, torch.float32), logits(T, W, seed // 2 + 1, torch.float32)
    assert run(student, teacher, divergence=name, **weights).loss.item() >= -3 * 50 * 2**-23


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


def test_no_aligned_chunk_stays_connected():
    student = logits(S, V, 0).requires_grad_()
    out = run(student, logits(T, W, 1), chunks=tuple(torch.full_like(side, -1) for side in CHUNKS))
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()


@pytest.mark.parametrize("chunk_size", [16, None])
def test_saves_the_gradient_and_nothing_else(chunk_size):
    """Half of the chunks are 1:2."""

    def loss(student, teacher):
        positions, width = student.shape[1:]
        settings_of = same_tokenizer(width, positions)
        student_chunks = torch.where(torch.arange(positions) < positions // 2, torch.arange(positions), -1)
        settings_of["chunks"] = (student_chunks.expand(B, -1), (torch.arange(positions) // 2).expand(B, -1))
        return run(student, teacher, chunk_size=chunk_size, **settings_of).loss

    assert bytes_saved(loss) <= 1.1


def test_what_does_not_fit_is_named():
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    with pytest.raises(ProjectionError, match="add_byte_prefix"):
        run(student, teacher, oracle_prefix.matrix([], V, W))
    with pytest.raises(ProjectionError, match=r"byte order .* nemo_opd\.projection\.add_byte_prefix"):
        run(student, teacher, oracle_prefix.matrix([], V, W, byte_prefix=PHI))
