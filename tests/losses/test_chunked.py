import pytest
import torch

from nemo_opd.errors import ConfigError
from nemo_opd.losses.chunked import chunked_sum, equal_parts


def cubes(rows: torch.Tensor, part: slice) -> torch.Tensor:
    return (rows**3).sum()


def total(source, rows, chunk_size=2, width=3):
    return chunked_sum(source, rows, cubes, width=width, parts=equal_parts(rows, width, chunk_size))


def test_value_and_gradient_are_those_of_the_plain_sum():
    source = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([5, 0, 3])
    (gradient,) = torch.autograd.grad(2 * total(source, rows), source)
    expected = torch.zeros(6, 4, dtype=torch.float64)
    used = source.detach().flatten(0, 1)[rows, :3]
    expected[rows, :3] = 6 * used**2
    assert torch.equal(gradient.flatten(0, 1), expected)
    torch.testing.assert_close(total(source, rows), (used**3).sum())


def test_a_source_that_is_not_contiguous_gets_its_gradient():
    """A gradient written through a view of a strided buffer is lost in a copy."""
    source = torch.randn(4, 3, 2, dtype=torch.float64).permute(2, 1, 0).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: total(z, torch.tensor([0, 4])), source)


def test_backward_twice_gives_the_same():
    """Scaling the saved gradient in place would scale it again."""
    source = torch.randn(1, 3, 3, requires_grad=True)
    loss = 3 * total(source, torch.arange(3))
    first, second = (torch.autograd.grad(loss, source, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_no_rows_stay_connected():
    """A rank without units must still join the backward collectives."""
    source = torch.randn(1, 3, 3, requires_grad=True)
    loss = total(source, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert not source.grad.any()


def test_without_gradient_no_chunk_builds_a_graph():
    seen = []

    def loss_of(rows, part):
        seen.append((rows.requires_grad, torch.is_grad_enabled()))
        return rows.sum()

    source = torch.randn(1, 3, 3, requires_grad=True)
    parts = equal_parts(torch.arange(3), 3, 2)
    with torch.no_grad():
        assert not chunked_sum(source, torch.arange(3), loss_of, width=3, parts=parts).requires_grad
    chunked_sum(source.detach(), torch.arange(3), loss_of, width=3, parts=parts)
    assert seen == [(False, False)] * 4


def test_low_precision_is_computed_in_fp32_and_returned_in_kind():
    source = torch.randn(1, 3, 3).bfloat16().requires_grad_()
    loss = total(source, torch.arange(3))
    loss.backward()
    assert loss.dtype == torch.float32
    assert source.grad.dtype == torch.bfloat16


def test_parts_cover_the_rows_once():
    assert equal_parts(torch.arange(5), 1, 2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert equal_parts(torch.arange(0), 1, None) == []
    assert len(equal_parts(torch.arange(3), 10**12, None)) == 3
    with pytest.raises(ConfigError, match="chunk_size=-1"):
        equal_parts(torch.arange(5), 1, -1)
