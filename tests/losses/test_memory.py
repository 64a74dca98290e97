"""Memory that a loss keeps for backward: the gradient and nothing else of that size (methods.md §8.1)."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from nemo_opd.losses import cross_entropy, same_vocab

B, S, V = 2, 64, 500
MASK = torch.ones(B, S, dtype=torch.bool)
IDS = torch.zeros(B, S, dtype=torch.long)


def bytes_saved(loss_of_logits) -> float:
    """Return all bytes saved for backward, as a multiple of the bf16 logits."""
    student = torch.randn(B, S, V, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    teacher = torch.randn(B, S, V, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel() * tensor.element_size())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of_logits(student, teacher)
    loss.backward()
    assert student.grad.any()
    return sum(packed) / (student.numel() * student.element_size())


def test_cross_entropy():
    assert bytes_saved(lambda student, teacher: cross_entropy(student, IDS, mask=MASK).loss) <= 1.1


@pytest.mark.parametrize("support", ["teacher_topk", "student_topk", "union"])
def test_the_parity_form(support):
    """Bug: a support chosen outside of the blocks, or its gathered cells kept."""
    options = {"support": support, "top_k": 50, "normalization": "full", "chunk_size": 16}
    assert bytes_saved(lambda *logits: same_vocab(*logits, mask=MASK, **options).loss) <= 1.1


def test_the_measure_sees_a_loss_that_keeps_more():
    """Bug: hooks that see nothing. A plain fp32 KL keeps its log-softmax, twice the bytes of the logits."""
    assert bytes_saved(lambda student, teacher: student.float().log_softmax(-1).exp().sum() + student.sum() * 0) >= 2
