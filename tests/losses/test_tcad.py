"""TCAD's choice of its support, and small coverage losses (methods.md §10.2)."""

import math

import pytest
import torch

from nemo_opd.losses import tcad
from nemo_opd.losses.tcad import interleaved

from .cases import random_logits

V = 9


def by_turns(z_t: list[float], z_s: list[float], size: int) -> list[int]:
    ranked = [sorted(range(len(side)), key=lambda column: -side[column]) for side in (z_t, z_s)]
    columns: list[int] = []
    for pair in zip(*ranked, strict=True):
        columns += [column for column in dict.fromkeys(pair) if column not in columns]
    return columns[:size]


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_the_support_is_taken_by_turns(size):
    """Ranks of both sides overlap in part. Bug: a column counted twice, or the student's first."""
    teacher = random_logits(1, 20, 50, 6)[0]
    student = teacher + random_logits(1, 20, 50, 7, 1.0)[0]
    supports = interleaved(teacher, student, size).index
    for row, z_t, z_s in zip(supports.tolist(), teacher.tolist(), student.tolist(), strict=True):
        assert row == by_turns(z_t, z_s, size)


def test_coverage_does_not_round_to_zero():
    """Bug: in fp32, no gradient outside of the support if e^−20 of the student's mass lies there."""
    student = torch.tensor([[[20.0, 20.0, 0.0], [0.0, 0.0, 0.0]]]).requires_grad_()
    teacher = torch.tensor([[[20.0, 20.0, 0.0], [0.0, 0.0, 0.0]]])
    loss = tcad(student, teacher, mask=torch.tensor([[0, 1]]), support_size=2).loss
    (gradient,) = torch.autograd.grad(loss, student)
    assert float(loss.detach()) == pytest.approx(math.exp(-20) / 2, rel=1e-5)
    assert float(gradient[0, 0, 2]) == pytest.approx(math.exp(-20) / 2, rel=1e-5)
