"""A projection during learning, and the gradient of a loss that reads it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_opd.losses import LearnedProjection
from nemo_opd.projection import ProjectionMatrix


def moved_projection(matrix: ProjectionMatrix) -> LearnedProjection:
    learned = LearnedProjection(matrix)
    learned.delta.data = torch.randn(learned.delta.shape, generator=torch.Generator().manual_seed(2))
    return learned


def check_against_dense(
    matrix: ProjectionMatrix,
    student: Tensor,
    run: Callable[..., Tensor],
    dense_loss: Callable[..., Tensor],
    **options: Any,
) -> None:
    """Compare `run(learned, student)` and its gradients with autograd through `dense_loss(learned, Δ, student, τ)`."""
    learned = moved_projection(matrix)
    trained_student = student.clone().requires_grad_()
    loss = run(learned, trained_student, **options)
    loss.backward()
    delta, dense_student = learned.delta.detach().double().requires_grad_(), student.clone().requires_grad_()
    expected = dense_loss(learned, delta, dense_student, options.get("temperature", 1.0))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-11)
    np.testing.assert_allclose(trained_student.grad, dense_student.grad, rtol=1e-9, atol=1e-13)
    # The gradient is rounded to float32, as Δ is.
    np.testing.assert_allclose(learned.delta.grad, delta.grad, rtol=1e-6, atol=1e-8)
    assert learned.delta.grad.abs().max() > 0.01


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
    # The error is of second order in the step, and Δ + step · direction is rounded to float32.
    assert along == pytest.approx((values[0] - values[1]) / 2e-3, rel=1e-3)
    assert abs(along) > 1e-4
