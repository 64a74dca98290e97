import pytest
import torch

from nemo_opd.errors import ConfigError
from nemo_opd.losses.chunked import Term, chunked_sum, own_parts, unit_cells, unit_parts
from nemo_opd.losses.logit_rows import TensorLogits


def cubes(logits: torch.Tensor, part: slice) -> torch.Tensor:
    return (logits**3).sum(-1)


def sums(source, rows, chunk_size=2, width=3, weights=None, loss_of=cubes):
    student = TensorLogits(source)
    parts = unit_parts(student, unit_cells(len(rows), width), chunk_size)
    return chunked_sum(student, [Term(rows.__getitem__, loss_of, parts, weights)], width=width)


def total(source, rows):
    return sums(source, rows).total


def test_value_and_gradient_are_those_of_the_plain_sum():
    source = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([5, 0, 3])
    (gradient,) = torch.autograd.grad(2 * total(source, rows), source)
    expected = torch.zeros(6, 4, dtype=torch.float64)
    used = source.detach().flatten(0, 1)[rows, :3]
    expected[rows, :3] = 6 * used**2
    assert torch.equal(gradient.flatten(0, 1), expected)
    torch.testing.assert_close(total(source, rows), (used**3).sum())


def test_weights_are_of_units_and_leave_the_other_sum_as_it_is():
    source = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    rows, weights = torch.tensor([2, 0, 3]), torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64)
    found = sums(source, rows, weights=weights)
    each = (source.detach()[0, rows] ** 3).sum(-1)
    torch.testing.assert_close(found.total.detach(), (weights * each).sum())
    torch.testing.assert_close(found.unweighted, each.sum())
    (gradient,) = torch.autograd.grad(found.total, source)
    torch.testing.assert_close(gradient[0, rows], 3 * weights.unsqueeze(1) * source.detach()[0, rows] ** 2)


def test_terms_add_up_where_they_share_rows():
    source = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    rows = (torch.tensor([2, 0, 3]), torch.tensor([3, 2]))
    terms = [
        Term(rows[0].__getitem__, cubes, [slice(0, 2), slice(2, 3)]),
        Term(rows[1].__getitem__, cubes, [slice(0, 2)]),
    ]
    found = chunked_sum(TensorLogits(source), [terms[0], terms[1].times(0.5)], width=3)
    each = source.detach()[0] ** 3
    torch.testing.assert_close(found.total.detach(), (1.5 * each[2] + each[0] + 1.5 * each[3]).sum())
    (gradient,) = torch.autograd.grad(found.total, source)
    factors = torch.tensor([1.0, 0.0, 1.5, 1.5], dtype=torch.float64).unsqueeze(1)
    torch.testing.assert_close(gradient[0], 3 * factors * source.detach()[0] ** 2)


def test_a_source_that_is_not_contiguous_gets_its_gradient():
    """A gradient written through a view of a strided buffer is lost in a copy."""
    source = torch.randn(4, 3, 2, dtype=torch.float64).permute(2, 1, 0).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: total(z, torch.tensor([0, 4])), source)


def test_backward_twice_gives_the_same():
    """Scaling the saved gradient in place while the graph is retained would scale it again."""
    source = torch.randn(1, 3, 3, requires_grad=True)
    loss = 3 * total(source, torch.arange(3))
    first, second = (torch.autograd.grad(loss, source, retain_graph=True)[0] for _ in range(2))
    (last,) = torch.autograd.grad(loss, source)
    assert torch.equal(first, second)
    assert torch.equal(first, last)


def test_backward_makes_no_second_gradient():
    """A copy of it would be the peak of a step, and grow with the batch."""
    source = torch.randn(1, 3, 3, requires_grad=True)
    seen = []

    def pack(tensor):
        seen.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = total(source, torch.arange(3))
    (gradient,) = torch.autograd.grad(3 * loss, source)
    assert gradient.data_ptr() in seen


def test_no_rows_stay_connected():
    """A rank without units must still join the backward collectives."""
    source = torch.randn(1, 3, 3, requires_grad=True)
    loss = total(source, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert not source.grad.any()


def test_without_gradient_no_chunk_builds_a_graph():
    seen = []

    def loss_of(logits, part):
        seen.append((logits.requires_grad, torch.is_grad_enabled()))
        return logits.sum(-1)

    source = torch.randn(1, 3, 3, requires_grad=True)
    with torch.no_grad():
        assert not sums(source, torch.arange(3), loss_of=loss_of).total.requires_grad
    sums(source.detach(), torch.arange(3), loss_of=loss_of)
    assert seen == [(False, False)] * 4


def test_low_precision_is_computed_in_fp32_and_returned_in_kind():
    source = torch.randn(1, 3, 3).bfloat16().requires_grad_()
    loss = total(source, torch.arange(3))
    loss.backward()
    assert loss.dtype == torch.float32
    assert source.grad.dtype == torch.bfloat16


SOURCE = TensorLogits(torch.zeros(1, 1, 1))


def test_parts_cover_the_units_once():
    assert unit_parts(SOURCE, unit_cells(5, 1), 2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert unit_parts(SOURCE, unit_cells(0, 1)) == []
    assert len(unit_parts(SOURCE, unit_cells(3, 10**12))) == 3
    with pytest.raises(ConfigError, match="chunk_size=-1"):
        unit_parts(SOURCE, unit_cells(5, 1), -1)


def test_parts_fit_the_budget_by_what_their_positions_take(monkeypatch):
    """A chunk of many tokens would take many times the memory of its neighbours."""
    monkeypatch.setattr("nemo_opd.losses.chunked.CPU_CHUNK_BYTES", 40)
    lengths = [0, 1, 9, 10, 11, 31, 32]
    assert unit_parts(SOURCE, unit_cells(6, 1, (lengths, 1))) == [
        slice(0, 1),
        slice(1, 2),
        slice(2, 4),
        slice(4, 5),
        slice(5, 6),
    ]


def test_every_process_of_a_share_has_as_many_parts():
    """A process with a part less would leave the others waiting in a collective read."""

    class Shared(TensorLogits):
        def __init__(self, index: int) -> None:
            super().__init__(torch.zeros(1, 1, 1))
            self.share = (index, 2)

    parts = unit_parts(Shared(0), unit_cells(5, 1))
    assert parts == [slice(0, 3), slice(3, 5)]
    odd = [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(own_parts(Shared(0), odd)) == [slice(0, 2), slice(4, 5)]
    assert list(own_parts(Shared(1), odd)) == [slice(2, 4), slice(5, 5)]
