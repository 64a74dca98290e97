import pytest
import torch

from nemo_opd.losses.fused import log_sum_exp


def test_log_sum_exp_equals_torchs_in_value_and_gradient():
    logits = (10 * torch.randn(4, 30, dtype=torch.float64)).requires_grad_()
    weights = torch.randn(4, dtype=torch.float64)
    computed, expected = log_sum_exp(logits), logits.logsumexp(-1)
    gradients = [torch.autograd.grad((value * weights).sum(), logits)[0] for value in (computed, expected)]
    torch.testing.assert_close(computed, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("peak", [-150.0, 0.0, 150.0])
def test_log_sum_exp_of_far_and_empty_cells(peak):
    """Bug: −inf − −inf is NaN. In fp32 all cells but the largest underflow."""
    logits = torch.tensor([[peak, peak - 120, -torch.inf, torch.finfo(torch.float32).min]], requires_grad=True)
    value = log_sum_exp(logits)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.item() == peak
    assert torch.equal(gradient, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
