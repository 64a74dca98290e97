import pytest
import torch

from nemo_opd.logits.blocks import blocks
from nemo_opd.logits.blockwise import blockwise_sum
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import TensorLogits
from nemo_opd.logits.term import Term, unit_cells


def cubes(logits: torch.Tensor, part: slice) -> torch.Tensor:
    return (logits**3).sum(-1)


def sums(source, rows, chunk_size=2, width=3, weights=None, loss_of=cubes):
    term = Term(rows, loss_of, unit_cells(len(rows), width), width, weights=weights, chunk_size=chunk_size)
    return blockwise_sum(TensorLogits(source), [term], [1.0])


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
    result = sums(source, rows, weights=weights)
    losses = (source.detach()[0, rows] ** 3).sum(-1)
    torch.testing.assert_close(result.total.detach(), (weights * losses).sum())
    torch.testing.assert_close(result.of_terms[0], torch.stack([result.total.detach(), losses.sum()]))
    (gradient,) = torch.autograd.grad(result.total, source)
    torch.testing.assert_close(gradient[0, rows], 3 * weights.unsqueeze(1) * source.detach()[0, rows] ** 2)


def squares_of_pairs(logits: torch.Tensor, part: slice) -> torch.Tensor:
    """Return the losses of units of two rows; each loss needs both rows."""
    return (logits[0::2] * logits[1::2]).square().sum(-1)


def terms_of_different_units(chunk_size: int | None) -> list[Term]:
    """Return a term of single rows and a term of pairs, which share rows and cross the blocks' boundaries."""
    single, pairs = torch.tensor([0, 2, 3, 5, 7]), torch.tensor([1, 2, 3, 4, 6, 7])
    weights = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
    return [
        Term(single, cubes, unit_cells(5, 3), 3, chunk_size=chunk_size),
        Term(pairs, squares_of_pairs, unit_cells(3, 4), 4, [0, 2, 4, 6], weights, factor=3.0, chunk_size=chunk_size),
    ]


def expected_sums(logits: torch.Tensor) -> torch.Tensor:
    """Return the weighted and plain sums [2, 2] of `terms_of_different_units`."""
    singles = (logits[[0, 2, 3, 5, 7], :3] ** 3).sum()
    pairs = 3 * torch.stack([(logits[a, :4] * logits[b, :4]).square().sum() for a, b in ((1, 2), (3, 4), (6, 7))])
    weighted = pairs[0] + 0.5 * pairs[1] - 2 * pairs[2]
    return torch.stack([torch.stack([singles, singles]), torch.stack([weighted, pairs.sum()])])


@pytest.mark.parametrize("chunk_size", [1, 2, 3, None])
def test_terms_taken_together_are_the_sum_of_each(chunk_size):
    source = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    result = blockwise_sum(TensorLogits(source), terms_of_different_units(chunk_size), [0.5, -1.5])
    sums = expected_sums(source.flatten(0, 1))
    total = 0.5 * sums[0, 0] - 1.5 * sums[1, 0]
    torch.testing.assert_close(result.of_terms, sums.detach())
    torch.testing.assert_close(result.total, total)
    torch.testing.assert_close(*(torch.autograd.grad(value, source)[0] for value in (result.total, total)))
    with torch.no_grad():
        without_gradient = blockwise_sum(TensorLogits(source), terms_of_different_units(chunk_size), [0.5, -1.5])
    assert torch.equal(without_gradient.of_terms, result.of_terms)


class CountedHead(HeadLogits):
    """Counts the rows of logits that it computes."""

    num_read = 0

    def read(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        self.num_read += len(rows)
        return super().read(rows, width)


@pytest.mark.parametrize("chunk_size", [2, None])
def test_terms_taken_together_share_the_products_with_the_head(chunk_size):
    hidden = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    source = CountedHead(hidden, Head(weight))
    result = blockwise_sum(source, terms_of_different_units(chunk_size), [0.5, -1.5])
    sums = expected_sums((hidden @ weight.t()).flatten(0, 1))
    total = 0.5 * sums[0, 0] - 1.5 * sums[1, 0]
    gradients = [torch.autograd.grad(value, [hidden, weight]) for value in (result.total, total)]
    torch.testing.assert_close(*gradients)
    assert source.num_read == 8


def test_a_source_that_is_not_contiguous_gets_its_gradient():
    """Bug: a gradient written through a view of a strided buffer is lost in a copy."""
    source = torch.randn(4, 3, 2, dtype=torch.float64).permute(2, 1, 0).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: total(z, torch.tensor([0, 4])), source)


def test_backward_twice_gives_the_same():
    """Bug: the saved gradient is scaled in place, and scaled again in a second backward pass."""
    source = torch.randn(1, 3, 3, requires_grad=True)
    loss = 3 * total(source, torch.arange(3))
    first, second = (torch.autograd.grad(loss, source, retain_graph=True)[0] for _ in range(2))
    (last,) = torch.autograd.grad(loss, source)
    assert torch.equal(first, second)
    assert torch.equal(first, last)


def test_backward_makes_no_second_gradient():
    """Bug: a copy of the gradient is the peak of a step's memory and grows with the batch."""
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
    """Bug: a rank without units does not join the collectives of the backward pass."""
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


@pytest.mark.parametrize("is_product", [False, True])
def test_rows_of_two_blocks_get_both_gradients(is_product, monkeypatch):
    """Bug: a row's gradient from a later block replaces the earlier one. Units overlap, so blocks cut some of them."""
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", 1)
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_PRODUCT_ROWS", 1)
    hidden = torch.randn(2, 12, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    terms = []
    for first, width in ((0, 4), (1, 5)):
        begins = list(range(0, 24 - 2 * first + 1, 2))
        rows = torch.arange(first, 24 - first)
        terms.append(Term(rows, squares_of_pairs, unit_cells(len(begins) - 1, 2 * width), width, begins))
    logits = hidden @ weight.t()
    source = HeadLogits(hidden, Head(weight)) if is_product else TensorLogits(logits)
    assert any(block.overlaps for block in blocks(source, terms))
    result = blockwise_sum(source, terms, [0.5, -1.5])
    flat = logits.flatten(0, 1)
    all_units = slice(0, None)
    total = 0.5 * terms[0].loss_of(flat[:, :4], all_units).sum() - 1.5 * terms[1].loss_of(flat[1:-1], all_units).sum()
    gradients = [torch.autograd.grad(value, [hidden, weight], retain_graph=True) for value in (result.total, total)]
    torch.testing.assert_close(*gradients)
