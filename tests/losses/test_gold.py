import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.losses import same_vocab
from nemo_opd.losses.gold import gold
from nemo_opd.losses.pairs import TokenPairs
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


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_gradient(kind, weights):
    teacher = logits(T, W, 1)

    def loss(student):
        return run(
            student,
            teacher,
            divergence=kind,
            temperature=1.7,
            chunk_size=2,
            normalizer=4,
            uncommon_weight=0.6,
            uncommon_topk=5,
            **weights,
        ).loss

    assert torch.autograd.gradcheck(loss, logits(S, V + 1, 0).requires_grad_())


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_same_tokenizer_equals_same_vocab(kind, weights):
    student, teacher = logits(S, V, 0).requires_grad_(), logits(S, V, 1)
    options = {"divergence": kind, "temperature": 1.4} | weights
    paired = run(student, teacher, identity(V, V), identity_chunks(), **options).loss
    direct = same_vocab(student, teacher, mask=torch.ones(B, S), **options).loss
    torch.testing.assert_close(paired, direct, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (paired, direct)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize("num_pairs", [V, 4])
def test_teacher_equal_to_student_is_exactly_zero(kind, weights, num_pairs):
    """Also the tails: |p − q| of equal sides has a gradient of 0."""
    student = logits(S, V, 0, torch.bfloat16).requires_grad_()
    teacher = student.detach().clone()
    matrix = identity(V, num_pairs)
    out = run(student, teacher, matrix, identity_chunks(), divergence=kind, temperature=0.7, **weights)
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_extreme_logits_are_finite(kind, weights):
    student = (150 * logits(S, V, 0, torch.float32).sign()).requires_grad_()
    out = run(student, 150 * logits(T, W, 1, torch.float32).sign(), divergence=kind, **weights)
    out.loss.backward()
    assert out.loss.isfinite()
    assert out.loss > 0
    assert student.grad.isfinite().all()


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


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(oracle.KINDS), uncommon=st.floats(0, 2))
def test_not_negative(seed, kind, uncommon):
    """fp32 rounds log-ratios of at most 50 nats by 2^−24 of that."""
    name, weights = kind
    student, teacher = logits(S, V, seed, torch.float32), logits(T, W, seed // 2 + 1, torch.float32)
    loss = run(student, teacher, divergence=name, uncommon_weight=uncommon, **weights).loss
    assert loss.item() >= -3 * 50 * 2**-23


def test_invariant_to_chunks_microbatches_order_and_padding():
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    pad = torch.nn.functional.pad

    def settings_of(order, width, chunk_size, rows_per_call):
        z = pad(student[order], (0, 0, 0, width), value=7.0).requires_grad_()
        t = pad(teacher[order], (0, 0, 0, 2 * width), value=-3.0)
        chunks = [pad(side[order], (0, k * width), value=-1) for side, k in zip(CHUNKS, (1, 2), strict=True)]
        loss = sum(
            run(z[i:j], t[i:j], chunks=tuple(side[i:j] for side in chunks), normalizer=5, chunk_size=chunk_size).loss
            for i, j in ((k, k + rows_per_call) for k in range(0, B, rows_per_call))
        )
        (gradient,) = torch.autograd.grad(loss, z)
        return loss, gradient[:, :S][torch.argsort(torch.tensor(order))]

    reference = settings_of([0, 1], 0, None, 2)
    for setting in (([0, 1], 0, 1, 2), ([0, 1], 0, 2, 1), ([1, 0], 0, None, 2), ([1, 0], 4, 2, 1)):
        torch.testing.assert_close(settings_of(*setting), reference, rtol=1e-12, atol=1e-15)


def test_a_wider_head_changes_nothing_and_gets_no_gradient():
    student, teacher = logits(S, V + 2, 0).requires_grad_(), logits(T, W + 2, 1)
    wide = run(student, teacher).loss
    narrow = run(student[..., :V], teacher[..., :W]).loss
    assert torch.equal(wide, narrow)
    wide.backward()
    assert not student.grad[..., V:].any()


def test_no_aligned_chunk_stays_connected():
    student = logits(S, V, 0, torch.bfloat16).requires_grad_()
    out = run(student, logits(T, W, 1), chunks=tuple(torch.full_like(side, -1) for side in CHUNKS))
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()


@pytest.mark.parametrize("chunk_size", [16, None])
def test_only_the_gradient_is_saved(chunk_size):
    positions, size = 64, 400
    student = logits(positions, size, 0, torch.bfloat16).requires_grad_()
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(
            student,
            logits(positions, size, 1, torch.bfloat16),
            identity(size, 300),
            identity_chunks(positions),
            chunk_size=chunk_size,
        )
    out.loss.backward()
    assert student.grad.any()
    assert sum(saved) <= 1.1 * student.numel() * student.element_size()


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
        ({"merge": "observed"}, "merge='observed'.*choose from first, mean"),
        ({"common_weight": -1.0}, "common_weight=-1.0"),
        ({"uncommon_weight": float("nan")}, "uncommon_weight=nan"),
        ({"uncommon_topk": 0}, "uncommon_topk=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"student_vocab_size": V + 1}, f"student_vocab_size={V + 1}"),
        ({"chunks": (CHUNKS[0], CHUNKS[1][:, 1:])}, "teacher_ids has shape"),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        run(**({"student": logits(S, V, 0), "teacher": logits(T, W, 1)} | wrong))


def test_a_matrix_without_exact_rows_is_refused():
    matrix = ProjectionMatrix(MATRIX.indices, MATRIX.weights, teacher_vocab_size=W)
    with pytest.raises(ProjectionError, match="matches no token"):
        run(logits(S, V, 0), logits(T, W, 1), matrix)
