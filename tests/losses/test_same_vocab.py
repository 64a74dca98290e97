import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from nemo_opd.errors import ConfigError
from nemo_opd.losses import same_vocab

from . import oracle, oracle_support

MASK = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 1, 1, 0]])


def logits(width: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    return (3 * torch.randn(2, 5, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize("tau", [1.0, 2.5])
def test_value_equals_the_loop(kind, weights, tau):
    """The shift, the cut of both heads, τ² and the division by scored tokens."""
    student, teacher = logits(9, 0), logits(8, 1)
    out = same_vocab(
        student, teacher, mask=MASK, divergence=kind, temperature=tau, student_vocab_size=7, chunk_size=2, **weights
    )
    expected = oracle.same_vocab(student.tolist(), teacher.tolist(), MASK.tolist(), 7, kind, tau, **weights)
    assert out.loss.item() == pytest.approx(expected / 5, rel=1e-12)
    assert out.metrics["kd"].value() == pytest.approx(expected / 5, rel=1e-12)
    assert out.metrics["kd"].count == 5


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_gradient(kind, weights):
    teacher = logits(6, 1)

    def loss(student):
        return same_vocab(
            student, teacher, mask=MASK, divergence=kind, temperature=1.7, chunk_size=2, normalizer=4, **weights
        ).loss

    assert torch.autograd.gradcheck(loss, logits(7, 0).requires_grad_())


truncation = pytest.mark.parametrize(
    "options",
    [
        {"support": "teacher_topk", "top_k": 2, "normalization": "rest"},
        {"support": "student_topk", "top_k": 3, "normalization": "support"},
        {"support": "union", "top_k": 2, "normalization": "rest"},
        {"support": "union", "top_k": 3, "normalization": "full"},
    ],
)


@truncation
@pytest.mark.parametrize(("kind", "weights"), oracle_support.KINDS)
def test_truncated_value_equals_the_loop(kind, weights, options):
    """The choice is made in the vocabulary: the padding columns, which are large here, are none of it."""
    student, teacher = logits(9, 0), logits(8, 1)
    student[..., 7:], teacher[..., 7:] = 30.0, 40.0
    out = same_vocab(
        student,
        teacher,
        mask=MASK,
        divergence=kind,
        temperature=2.5,
        student_vocab_size=7,
        chunk_size=2,
        **options,
        **weights,
    )
    expected = oracle_support.same_vocab(
        student.tolist(),
        teacher.tolist(),
        MASK.tolist(),
        7,
        kind,
        2.5,
        support=options["support"],
        k=options["top_k"],
        normalization=options["normalization"],
        **weights,
    )
    assert out.loss.item() == pytest.approx(expected / 5, rel=1e-11)


@truncation
@pytest.mark.parametrize(("kind", "weights"), oracle_support.KINDS)
def test_truncated_gradient(kind, weights, options):
    teacher = logits(6, 1)

    def loss(student):
        return same_vocab(
            student, teacher, mask=MASK, divergence=kind, temperature=1.7, chunk_size=2, **options, **weights
        ).loss

    assert torch.autograd.gradcheck(loss, logits(7, 0).requires_grad_())


@pytest.mark.parametrize("support", oracle_support.SUPPORTS)
@pytest.mark.parametrize(("kind", "weights"), oracle_support.KINDS)
def test_truncated_bf16_teacher_equal_to_student_is_exactly_zero(kind, weights, support):
    """bf16 logits are full of ties, which either side must break alike."""
    student = logits(300, 0, torch.bfloat16).requires_grad_()
    options = {"support": support, "top_k": 20, "normalization": "rest"}
    out = same_vocab(student, student.detach().clone(), mask=MASK, divergence=kind, **options, **weights)
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()


def test_padding_columns_and_unscored_rows_get_no_gradient():
    student = logits(9, 0).requires_grad_()
    same_vocab(student, logits(7, 1), mask=MASK).loss.backward()
    assert not student.grad[..., 7:].any()
    scored = torch.zeros(2, 5, dtype=torch.bool)
    scored[:, :-1] = MASK[:, 1:].bool()
    assert torch.equal(student.grad.abs().sum(-1) > 0, scored)


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_teacher_equal_to_student_is_exactly_zero(kind, weights):
    student = logits(50, 0, torch.bfloat16).requires_grad_()
    out = same_vocab(student, student.detach().clone(), mask=MASK, divergence=kind, temperature=0.7, **weights)
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_extreme_logits_are_finite(kind, weights):
    sign = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0)).sign()
    student = (150 * sign).requires_grad_()
    out = same_vocab(student, -150 * sign.flip(-1), mask=MASK, divergence=kind, **weights)
    out.loss.backward()
    assert out.loss.isfinite()
    assert student.grad.isfinite().all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(oracle.KINDS), tau=st.floats(0.5, 4))
def test_not_negative(seed, kind, tau):
    """Logits within ±20 are log-ratios within 80 nats a cell at τ = ½; fp32 rounds each by 2^−24 of that."""
    name, weights = kind
    student, teacher = logits(20, seed, torch.float32), logits(20, seed // 2 + 1, torch.float32)
    loss = same_vocab(student, teacher, mask=MASK, divergence=name, temperature=tau, **weights).loss
    assert loss.item() >= -(tau**2) * 80 * 2**-23


@pytest.mark.parametrize("options", [{}, {"support": "union", "top_k": 2, "normalization": "rest"}])
def test_invariant_to_chunks_microbatches_order_and_padding(options):
    """Global sums with a given normalizer: nothing about how a batch is cut may show in value or gradient."""
    teacher, student = logits(6, 1), logits(6, 0)

    def run(order, pad, chunk_size, rows_per_call):
        z = torch.nn.functional.pad(student[order], (0, 0, 0, pad), value=7.0).requires_grad_()
        t = torch.nn.functional.pad(teacher[order], (0, 0, 0, pad), value=-3.0)
        mask = torch.nn.functional.pad(MASK[order], (0, pad))
        loss = sum(
            same_vocab(z[i:j], t[i:j], mask=mask[i:j], normalizer=5, chunk_size=chunk_size, **options).loss
            for i, j in ((k, k + rows_per_call) for k in range(0, 2, rows_per_call))
        )
        (gradient,) = torch.autograd.grad(loss, z)
        return loss, gradient[:, :5][torch.argsort(torch.tensor(order))]

    reference = run([0, 1], 0, None, 2)
    for setting in (([0, 1], 0, 1, 2), ([0, 1], 0, 3, 1), ([1, 0], 0, None, 2), ([1, 0], 4, 2, 1)):
        torch.testing.assert_close(run(*setting), reference, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("options", [{}, {"support": "union", "top_k": 2, "normalization": "rest"}])
def test_all_masked_stays_connected(options):
    student = logits(6, 0).requires_grad_()
    out = same_vocab(student, logits(6, 1), mask=torch.zeros_like(MASK), **options)
    out.loss.backward()
    assert out.loss.item() == 0
    assert not student.grad.any()
    assert out.metrics["kd"].value() == 0


def test_no_units_in_the_global_batch_is_zero_and_not_nan():
    assert same_vocab(logits(6, 0), logits(6, 1), mask=torch.zeros_like(MASK), normalizer=0).loss.item() == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mask": MASK[:, :4]}, "mask has shape"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"divergence": "kl"}, "divergence='kl'"),
        ({"support": "union"}, "support=union needs top_k"),
        ({"student_vocab_size": 7}, "student_vocab_size=7: the logits have 6 columns"),
        ({"student_vocab_size": 5, "teacher_vocab_size": 6}, "differ"),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        same_vocab(logits(6, 0), logits(8, 1), **({"mask": MASK} | wrong))


@pytest.mark.parametrize("support", oracle_support.SUPPORTS)
@pytest.mark.parametrize("normalization", oracle_support.NORMALIZATIONS)
@pytest.mark.parametrize("chunk_size", [16, None])
def test_truncated_keeps_one_gradient_for_backward(support, normalization, chunk_size):
    """A support chosen outside the chunks, or its gathered cells kept, would show as more than the bf16 logits."""
    student, teacher = (
        torch.randn(2, 64, 500, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1)
    )
    student.requires_grad_()
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel() * tensor.element_size())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        same_vocab(
            student,
            teacher,
            mask=torch.ones(2, 64),
            support=support,
            top_k=50,
            normalization=normalization,
            chunk_size=chunk_size,
        ).loss.backward()
    assert student.grad.any()
    assert sum(packed) <= 1.1 * student.numel() * student.element_size()
