"""Logits of bf16 or fp16 hidden states are precise enough for a student and a teacher that nearly agree."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_opd.logits import Head, HeadLogits, head
from nemo_opd.logits.head import product
from nemo_opd.losses import cross_entropy, same_vocab

HALVES = [torch.bfloat16, torch.float16]
VOCABULARY, WIDTH, POSITIONS = 4000, 64, 24


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near_pair(peak: float, distance: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states of student and teacher and their common head. peak: the largest logit."""
    weight = drawn(VOCABULARY, WIDTH, seed=0) / WIDTH**0.5
    base = drawn(1, POSITIONS, WIDTH, seed=1)
    base *= peak / (base @ weight.t()).abs().amax()
    near = base + distance * base.std() * drawn(1, POSITIONS, WIDTH, seed=2)
    return near.to(dtype), base.to(dtype), weight.to(dtype)


def exact_kl(student: Tensor, teacher: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the mean forward KL over all positions except the last, in float64 and plain PyTorch."""
    shift = 0 if bias is None else bias.double()
    log_p, log_q = (
        (hidden.double() @ head_weight.double().t() + shift)[0, :-1].log_softmax(-1)
        for hidden, head_weight in ((student, weight), (teacher, weight.detach()))
    )
    return (log_q.exp() * (log_q - log_p)).sum(-1).mean()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("peak", [10.0, 20.0, 30.0])
@pytest.mark.parametrize("distance", [0.01, 0.1])
def test_a_small_divergence_is_what_it_is(peak: float, distance: float, dtype: torch.dtype) -> None:
    """Bug: with logits rounded to bf16, a KL of 6e-4 becomes 1.2e-3 and its gradient has cosine 0.76.

    The difference of two logits, about sqrt(2 KL) > 5e-3, has the fp32 error of logits up to 30: at most 3e-6, less
    than 1e-3 of the difference. The gradient is rounded twice, to the head's dtype and when it is written; the
    tolerance is twice that, for cancellation in between.
    """
    student, teacher, weight = near_pair(peak, distance, dtype)
    leaf, exact_leaf = student.clone().requires_grad_(), student.double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    head_leaf = weight.clone().requires_grad_()
    exact = exact_kl(exact_leaf, teacher, exact_weight)
    exact.backward()
    mask = torch.ones(1, POSITIONS)
    loss = same_vocab(HeadLogits(leaf, Head(head_leaf)), HeadLogits(teacher, Head(weight)), mask=mask).loss
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    unit = torch.finfo(dtype).eps / 2
    for gradient, expected in ((leaf.grad, exact_leaf.grad), (head_leaf.grad, exact_weight.grad)):
        # Subnormal numbers of fp16 have an absolute error.
        tiny = torch.finfo(dtype).smallest_normal * unit * gradient.numel() ** 0.5
        assert (gradient.double() - expected).norm() < 4 * unit * expected.norm() + tiny


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_equal_sides_give_exactly_nothing(dtype: torch.dtype) -> None:
    student, _, weight = near_pair(30.0, 0.0, dtype)
    leaf = student.clone().requires_grad_()
    loss = same_vocab(
        HeadLogits(leaf, Head(weight)), HeadLogits(student, Head(weight)), mask=torch.ones(1, POSITIONS)
    ).loss
    loss.backward()
    assert loss.item() == 0
    assert not leaf.grad.any()


def test_a_loss_scale_reaches_what_fp16_has_no_numbers_for() -> None:
    """Bug: gradients are computed in the forward pass, before the scale is known, and underflow in fp16."""
    student, teacher, weight = near_pair(10.0, 0.01, torch.float16)
    exact_leaf, leaf = student.double().requires_grad_(), student.clone().requires_grad_()
    exact_kl(exact_leaf, teacher, weight).backward()
    mask, scale = torch.ones(1, POSITIONS), 1e6
    student_logits, teacher_logits = HeadLogits(leaf, Head(weight)), HeadLogits(teacher, Head(weight))
    loss = same_vocab(student_logits, teacher_logits, mask=mask, normalizer=(POSITIONS - 1) * scale).loss
    (loss * scale).backward()
    assert (leaf.grad.double() - exact_leaf.grad).norm() < 2**-9 * exact_leaf.grad.norm()


@pytest.mark.parametrize(
    ("hidden_dtype", "head_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_a_head_in_another_precision(hidden_dtype: torch.dtype, head_dtype: torch.dtype) -> None:
    """Bug: hidden states or head are rounded to the other's precision, as in models with an fp32 head."""
    student, teacher, weight = near_pair(20.0, 0.03, torch.float32)
    bias = drawn(VOCABULARY, seed=5)
    student, teacher = student.to(hidden_dtype), teacher.to(hidden_dtype)
    weight, bias = weight.to(head_dtype), bias.to(head_dtype)
    leaf, head_leaf = student.clone().requires_grad_(), weight.clone().requires_grad_()
    exact_leaf, exact_head = student.double().requires_grad_(), weight.double().requires_grad_()
    exact = exact_kl(exact_leaf, teacher, exact_head, bias)
    exact.backward()
    sources = HeadLogits(leaf, Head(head_leaf, bias)), HeadLogits(teacher, Head(weight, bias))
    loss = same_vocab(*sources, mask=torch.ones(1, POSITIONS), chunk_size=7).loss
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    for gradient, expected in ((leaf.grad, exact_leaf.grad), (head_leaf.grad, exact_head.grad)):
        unit = torch.finfo(gradient.dtype).eps / 2
        assert (gradient.double() - expected).norm() < (unit + 2e-3) * expected.norm()


def test_blocks_of_logits_count_as_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: rows are counted in the operands' bf16, so a block takes twice the budget."""
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", 8 * 4 * VOCABULARY)
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_PRODUCT_ROWS", 1)
    student, _, weight = near_pair(10.0, 0.0, torch.bfloat16)
    counts: list[int] = []

    class Counted(HeadLogits):
        def read(self, rows: Tensor, width: int) -> Tensor:
            counts.append(len(rows))
            return super().read(rows, width)

    ids = torch.zeros(1, POSITIONS, dtype=torch.long)
    cross_entropy(Counted(student.requires_grad_(), Head(weight)), ids, mask=torch.ones(1, POSITIONS), chunk_size=1)
    assert max(counts) == 8


@pytest.mark.parametrize("shape", [(0, 8, 3), (3, 8, 0), (1, 1, 1), (5, 300, 7000)])
def test_products_are_those_of_upcast_matrices(shape: tuple[int, int, int]) -> None:
    """Catches wrong products without rows, without columns, and with more columns than are upcast at a time."""
    rows, width, columns = shape
    a, b = drawn(rows, width, seed=3).bfloat16(), drawn(columns, width, seed=4).bfloat16().t()
    expected = a.double() @ b.double()
    # Sums of `width` fp32 terms in any order.
    bound = width * torch.finfo(torch.float32).eps * (a.double().abs() @ b.double().abs())
    result = product(a, b)
    assert result.dtype == torch.float32
    assert ((result.double() - expected).abs() <= bound).all()


class ProductSizes(TorchDispatchMode):
    """Records the [rows, inner, columns] of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = [argument for argument in arguments if isinstance(argument, Tensor)][-2:]
            self.sizes.append((len(a), *b.shape))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("vocabulary", [131, 136, 59])
def test_products_with_an_odd_vocabulary_are_cut(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a product of 151,669 columns, seven times as slow on a GPU as products of 151,616 and 53."""
    monkeypatch.setattr(head, "_is_cut", lambda device: True)
    monkeypatch.setattr(head, "_is_native", lambda device, dtype: True)
    hidden = drawn(2, 9, 16, seed=0).double().requires_grad_()
    weight = drawn(vocabulary, 16, seed=1).double().requires_grad_()
    ids = torch.randint(vocabulary, (2, 9), generator=torch.Generator().manual_seed(2))
    with ProductSizes() as products:
        cross_entropy(HeadLogits(hidden, Head(weight)), ids, mask=torch.ones(2, 9)).loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = (hidden @ weight.t())[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    torch.testing.assert_close(gradients, (hidden.grad, weight.grad), rtol=1e-12, atol=1e-14)
    assert len(products.sizes) == (6 if vocabulary == 131 else 3)
    vocabulary_sizes = {size for sizes in products.sizes for size in sizes} - {16}
    assert vocabulary_sizes == {131: {128, 3}, 136: {136}, 59: {59}}[vocabulary]
