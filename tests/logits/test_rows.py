"""Logits computed when a loss reads them give the same loss and gradients as a tensor of logits."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nemo_opd.errors import ConfigError
from nemo_opd.logits import AveragedLogits, Head, HeadLogits
from nemo_opd.losses import cross_entropy, same_vocab
from tests.losses.cases import LOSSES, Batch, Case, random_logits

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled and capped": {"bias": True, "scale": 0.7, "soft_cap": 4.0},
}


def random_head(width: int, depth: int, seed: int, bias: bool = False, **options) -> Head:
    weight = random_logits(1, width, depth, seed, 1.0)[0].requires_grad_()
    return Head(weight, random_logits(1, 1, width, seed + 1, 1.0)[0, 0].requires_grad_() if bias else None, **options)


def plain_logits(hidden: Tensor, head: Head) -> Tensor:
    """Compute the logits in plain PyTorch."""
    logits = hidden @ head.weight.t() if head.bias is None else hidden @ head.weight.t() + head.bias
    logits = logits * head.scale
    return logits if head.soft_cap is None else head.soft_cap * torch.tanh(logits / head.soft_cap)


def leaves(hidden: Tensor, head: Head) -> list[Tensor]:
    return [leaf for leaf in (hidden, head.weight, head.bias) if leaf is not None]


def hidden_states(batch: Batch) -> tuple[Tensor, Tensor]:
    sides = (batch.student, batch.teacher)
    hidden = (random_logits(*side.shape[:2], 5, seed, 1.5) for seed, side in enumerate(sides))
    return next(hidden).requires_grad_(), next(hidden)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_heads_give_what_their_logits_give(case: Case, kind: str):
    """Catches a wrong value, or gradient of hidden states, weight or bias, over several chunks and padded columns."""
    batch = case.batch()
    student_hidden, teacher_hidden = hidden_states(batch)
    student, teacher = (
        random_head(batch.student.shape[2] + 2, 5, 4, **HEADS[kind]),
        random_head(batch.teacher.shape[2] + 3, 5, 6),
    )
    sizes = {"student_vocab_size": batch.student.shape[2], "teacher_vocab_size": batch.teacher.shape[2]}
    teacher_logits = plain_logits(teacher_hidden, teacher)
    expected = case.run(batch.with_logits(plain_logits(student_hidden, student), teacher_logits), **sizes)
    sources = replace(batch, student=HeadLogits(student_hidden, student), teacher=HeadLogits(teacher_hidden, teacher))
    actual = case.run(sources, chunk_size=2, **sizes)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-12, atol=0)
    expected_gradients = torch.autograd.grad(expected.loss, leaves(student_hidden, student))
    for gradient, expected_gradient in zip(
        torch.autograd.grad(actual.loss, leaves(student_hidden, student)), expected_gradients, strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-13)
    assert teacher.weight.grad is None


def test_leaves_that_take_no_gradient_get_none():
    """Bug: a frozen head, as of a LoRA student, costs a gradient of its own size."""
    batch = LOSSES[0].batch()
    hidden, _ = hidden_states(batch)
    frozen = Head(random_head(8, 5, 0).weight.detach())
    mask = batch.student_chunk_id >= 0
    loss = same_vocab(HeadLogits(hidden, frozen), batch.teacher, mask=mask).loss
    loss.backward()
    assert hidden.grad is not None
    trained = random_head(8, 5, 0)
    same_vocab(HeadLogits(hidden.detach(), trained), batch.teacher, mask=mask).loss.backward()
    assert trained.weight.grad.any()


def test_only_gradients_of_the_leaves_are_saved():
    """Bug: logits or their gradients outlive a chunk."""
    hidden = random_logits(2, 64, 16, 0, 1.0).bfloat16().requires_grad_()
    wide_head = Head(random_logits(1, 4000, 16, 1, 1.0)[0].bfloat16().requires_grad_())
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.ones(2, 64, dtype=torch.long)
        cross_entropy(HeadLogits(hidden, wide_head), ids, mask=torch.ones(2, 64), chunk_size=8)
    assert sum(saved) == 2 * (hidden.numel() + wide_head.weight.numel())


def test_the_weights_gradient_is_summed_in_fp32():
    """Bug: the gradients of many chunks vanish because each is below the last bf16 digit of their sum."""
    hidden = torch.full((1, 1025, 1), 1.0).bfloat16()
    weight = torch.zeros(2, 1).bfloat16().requires_grad_()
    ids = torch.zeros(1, 1025, dtype=torch.long)
    cross_entropy(
        HeadLogits(hidden, Head(weight)), ids, mask=torch.ones(1, 1025), normalizer=1, chunk_size=1
    ).loss.backward()
    assert weight.grad.tolist() == [[-512.0], [512.0]]


def test_averaged_logits_are_the_convex_mean():
    student = random_logits(2, 5, 6, 0).requires_grad_()
    teachers = [random_logits(2, 5, width, seed) for seed, width in ((1, 6), (2, 7))]
    mask = torch.ones(2, 5)
    mean = 0.25 * teachers[0] + 0.75 * teachers[1][..., :6]
    averaged = same_vocab(student, AveragedLogits(teachers, [0.5, 1.5]), mask=mask, chunk_size=3)
    torch.testing.assert_close(averaged.loss, same_vocab(student, mean, mask=mask).loss, rtol=1e-12, atol=0)


def test_what_does_not_fit_is_named():
    hidden, weight = torch.zeros(1, 2, 3), torch.zeros(5, 3)
    with pytest.raises(ConfigError, match="last sizes must be equal"):
        HeadLogits(hidden, Head(torch.zeros(5, 4)))
    with pytest.raises(ConfigError, match="soft_cap=0"):
        Head(weight, soft_cap=0)
    with pytest.raises(ConfigError, match=r"has a bias \[4\]"):
        Head(weight, torch.zeros(4))
    with pytest.raises(ConfigError, match="one weight each"):
        AveragedLogits([torch.zeros(1, 2, 3)], [0.0])
    with pytest.raises(ConfigError, match="sequences and positions"):
        AveragedLogits([torch.zeros(1, 2, 3), torch.zeros(1, 3, 3)], [1, 1])
    with pytest.raises(ConfigError, match="AveragedLogits, which pass no gradient on"):
        same_vocab(AveragedLogits([torch.zeros(1, 2, 3)], [1]), torch.zeros(1, 2, 3), mask=torch.ones(1, 2))


def test_gradients_of_a_capped_head_are_freed() -> None:
    """Bug: an object that refers to itself keeps the gradient of the head until the garbage collector runs."""
    hidden = torch.zeros(1, 2, 3, requires_grad=True)
    gradients = HeadLogits(hidden, Head(torch.zeros(5, 3, requires_grad=True), scale=0.7, soft_cap=4.0)).gradients()
    alive = weakref.ref(gradients)
    gc.disable()
    try:
        del gradients
        assert alive() is None
    finally:
        gc.enable()
