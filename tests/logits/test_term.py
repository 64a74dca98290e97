"""Sums of gradients in rows aligned for GPUs."""

import torch

from nemo_opd.logits.term import GradientSink


def test_the_first_gradient_of_aligned_rows_is_compiled() -> None:
    """Bug: on GPUs, whose rows begin 64 numbers apart, gold and byte_prefix run uncompiled."""
    gradient, factors = torch.randn(3, 5), torch.randn(3, 1)
    total = torch.zeros(3, 64)[:, :5]
    sink = GradientSink(total, None, factors, is_first=True)
    torch.compile(GradientSink.add, fullgraph=True, backend="eager")(sink, gradient)
    torch.testing.assert_close(total, gradient * factors, rtol=0, atol=0)
