import pytest
import torch

from nemo_opd.errors import ConfigError
from nemo_opd.losses import same_vocab

from . import oracle, oracle_support
from .test_memory import MASK as MEASURED
from .test_memory import bytes_saved

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


def test_padding_columns_and_unscored_rows_get_no_gradient():
    student = logits(9, 0).requires_grad_()
    same_vocab(student, logits(7, 1), mask=MASK).loss.backward()
    assert not student.grad[..., 7:].any()
    scored = torch.zeros(2, 5, dtype=torch.bool)
    scored[:, :-1] = MASK[:, 1:].bool()
    assert torch.equal(student.grad.abs().sum(-1) > 0, scored)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"support": "union"}, "support=union needs top_k"),
        ({"student_vocab_size": 5, "teacher_vocab_size": 6}, "differ"),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        same_vocab(logits(6, 0), logits(8, 1), **({"mask": MASK} | wrong))


@pytest.mark.parametrize("support", oracle_support.SUPPORTS)
@pytest.mark.parametrize("chunk_size", [16, None])
def test_the_parity_form_keeps_one_gradient_for_backward(support, chunk_size):
    """A support chosen outside the chunks, or its gathered cells kept, would show as more than the bf16 logits."""
    options = {"support": support, "top_k": 50, "normalization": "full", "chunk_size": chunk_size}
    assert bytes_saved(lambda *logits: same_vocab(*logits, mask=MEASURED, **options).loss) <= 1.1
