"""Losses from hidden states in any precision, with any head, on one or two ranks, against float64."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.logits import Head, HeadLogits
from tests.models.world import on_ranks
from tests.vocab_parallel import vocab_parallel

from .head_draws import Draw, Exact, gradient_bound, value_bound

RANKS, DRAWS, DRAWS_ON_RANKS = 2, 60, 40


def products(exact: Exact, hidden: Tensor, weight: Tensor, columns: slice = slice(None)) -> list[float]:
    """Return norms of the sums of absolute summands in the gradients of hidden states, weight and bias, for these
    columns.
    """
    gradient, rows = exact.linear_gradient[:, columns].abs(), hidden.double().abs().flatten(0, 1)
    sums = gradient @ weight[columns].double().abs(), gradient.t() @ rows, gradient.sum(0)
    return [float(tensor.norm()) for tensor in sums]


@pytest.mark.parametrize("seed", range(DRAWS))
def test_a_whole_head(seed: int) -> None:
    """Bugs: a soft cap, scale or bias that the gradient misses, a sum in a narrow dtype."""
    draw = Draw.of(seed)
    exact = Exact.of(draw)
    hidden, head = draw.trained()
    loss = draw.loss(HeadLogits(hidden, head), draw.teacher)
    assert loss.dtype == torch.promote_types(draw.dtype, torch.float32)
    assert abs(loss.item() - exact.loss.item()) <= value_bound(draw, exact)
    loss.backward()
    leaves = [leaf for leaf in (hidden, head.weight, head.bias) if leaf is not None]
    sizes = products(exact, hidden.detach(), head.weight.detach())[: len(leaves)]
    for leaf, gradient, size in zip(leaves, exact.gradients, sizes, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == draw.dtype
        assert float((leaf.grad.double() - gradient).norm()) <= gradient_bound(draw, exact, gradient, size)


def excess_on_rank(seed: int, rank: int) -> float:
    """Return the largest error of a loss with its head sharded over the ranks, as a share of the allowed error."""
    draw = Draw.of(seed)
    exact = Exact.of(draw)
    group = dist.group.WORLD
    assert group is not None
    first = len(draw.heads[0].weight) * 2 // 3
    shard = slice(0, first) if rank == 0 else slice(first, None)
    hidden, full_head = draw.trained()
    weight = full_head.weight.detach()[shard].clone().requires_grad_()
    bias = None if full_head.bias is None else full_head.bias.detach()[shard].clone().requires_grad_()
    head = Head(weight, bias, full_head.scale, full_head.soft_cap)
    loss = draw.loss(vocab_parallel(HeadLogits(hidden, head), group), draw.teacher)
    loss.backward()
    shares = [abs(loss.item() - exact.loss.item()) / value_bound(draw, exact)]
    hidden_gradient, *head_gradients = exact.gradients
    sizes = products(exact, hidden.detach(), full_head.weight.detach())
    leaves = [(hidden, hidden_gradient, sizes[0]), (weight, head_gradients[0][shard], sizes[1])]
    if bias is not None:
        leaves.append((bias, head_gradients[1][shard], sizes[2]))
    for leaf, gradient, size in leaves:
        assert leaf.grad is not None
        error = float((leaf.grad.double() - gradient).norm())
        shares.append(error / gradient_bound(draw, exact, gradient, size))
    return max(shares)


def excesses(seeds: range) -> dict[int, float]:
    return {seed: excess_on_rank(seed, dist.get_rank()) for seed in seeds}


@pytest.mark.world
def test_a_head_on_two_ranks(tmp_path: Path) -> None:
    """Bug: columns or their gradients rounded on the way between ranks."""
    for shares in on_ranks(RANKS, excesses, range(1000, 1000 + DRAWS_ON_RANKS), tmp_path):
        assert {seed: share for seed, share in shares.items() if not share <= 1} == {}
