"""A projection in the middle of its learning, and the gradient of a loss that reads it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nemo_opd.losses import LearnedProjection
from nemo_opd.projection import ProjectionMatrix


def moved_projection(matrix: ProjectionMatrix) -> LearnedProjection:
    learned = LearnedProjection(matrix)
    learned.delta.data = torch.randn(learned.delta.shape, generator=torch.Generator().manual_seed(2))
    return learned


def check_gradient(matrix: ProjectionMatrix, loss: Callable[[LearnedProjection], Tensor]) -> None:
    """Compare Δ's gradient with a difference quotient of the loss's values, along a random direction."""
    learned = moved_projection(matrix)
    loss(learned).backward()
    direction = torch.randn(learned.delta.shape, generator=torch.Generator().manual_seed(3))
    along = (learned.delta.grad * direction).sum().item()
    values = []
    for step in (1e-3, -1e-3):
        shifted = moved_projection(matrix)
        shifted.delta.data += step * direction
        values.append(loss(shifted).item())
    # Of second order in the step, and Δ + step · direction is rounded to float32.
    assert along == pytest.approx((values[0] - values[1]) / 2e-3, rel=1e-3)
    assert abs(along) > 1e-3
