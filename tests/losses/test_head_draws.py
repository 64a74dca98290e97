"""Losses from hidden states in any precision, with any head, whole or on two ranks, against float64."""

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
    """Norms of the sizes of what is added up to the gradients of hidden states, weight and bias, by these columns."""
    gradient, rows = exact.of_linear[:, columns].abs(), hidden.double().abs().flatten(0, 1)
    made = gradient @ weight[columns].double().abs(), gradient.t() @ rows, gradient.sum(0)
    return [float(each.norm()) for each in made]


@pytest.mark.parametrize("seed", range(DRAWS))
def test_a_whole_head(seed: int) -> None:
    draw = Draw.of(seed)
    exact = Exact.of(draw)
    hidden, head = draw.trained()
    loss = draw.loss(HeadLogits(hidden, head), draw.teacher)
    assert loss.dtype == torch.promote_types(draw.dtype, torch.float32)
    assert abs(loss.item() - exact.loss.item()) <= value_bound(draw, exact)
    loss.backward()
    leaves = [leaf for leaf in (hidden, head.weight, head.bias) if leaf is not None]
    sizes = products(exact, hidden.detach(), head.weight.detach())[: len(leaves)]
    for leaf, wanted, size in zip(leaves, exact.gradients, sizes, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == draw.dtype
        assert float((leaf.grad.double() - wanted).norm()) <= gradient_bound(draw, exact, wanted, size)


def excess_on_rank(seed: int, rank: int) -> float:
    """The largest error of a loss whose head's rows lie on the ranks, as a share of what is allowed."""
    draw = Draw.of(seed)
    exact = Exact.of(draw)
    group = dist.group.WORLD
    assert group is not None
    first = len(draw.heads[0].weight) * 2 // 3
    own = slice(0, first) if rank == 0 else slice(first, None)
    hidden, whole = draw.trained()
    weight = whole.weight.detach()[own].clone().requires_grad_()
    bias = None if whole.bias is None else whole.bias.detach()[own].clone().requires_grad_()
    head = Head(weight, bias, whole.scale, whole.soft_cap)
    loss = draw.loss(vocab_parallel(HeadLogits(hidden, head), group), draw.teacher)
    loss.backward()
    shares = [abs(loss.item() - exact.loss.item()) / value_bound(draw, exact)]
    of_hidden, *of_rest = exact.gradients
    everywhere = products(exact, hidden.detach(), whole.weight.detach())
    leaves = [(hidden, of_hidden, everywhere[0]), (weight, of_rest[0][own], everywhere[1])]
    if bias is not None:
        leaves.append((bias, of_rest[1][own], everywhere[2]))
    for leaf, wanted, size in leaves:
        assert leaf.grad is not None
        error = float((leaf.grad.double() - wanted).norm())
        shares.append(error / gradient_bound(draw, exact, wanted, size))
    return max(shares)


def excesses(seeds: range) -> dict[int, float]:
    return {seed: excess_on_rank(seed, dist.get_rank()) for seed in seeds}


@pytest.mark.world
def test_a_head_on_two_ranks(tmp_path: Path) -> None:
    """Bug: columns or their gradients rounded on the way between ranks."""
    for found in on_ranks(RANKS, excesses, range(1000, 1000 + DRAWS_ON_RANKS), tmp_path):
        assert {seed: share for seed, share in found.items() if not share <= 1} == {}
