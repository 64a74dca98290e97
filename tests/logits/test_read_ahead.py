"""Rows read ahead are the rows that are asked for, in few wide products that fit their budget."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nemo_opd.logits.blocks import blocks
from nemo_opd.logits.blockwise import blockwise_sum
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.read_ahead import ReadAhead
from nemo_opd.logits.rows import TensorLogits
from nemo_opd.logits.term import Term, unit_cells

WIDTH = 3
ROW_BYTES = WIDTH * 8


class Counted(TensorLogits):
    """Notes how many rows it reads at a time."""

    is_product = True

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits)
        self.counts: list[int] = []

    def read(self, rows: Tensor, width: int) -> Tensor:
        self.counts.append(len(rows))
        return super().read(rows, width)


def source(num_rows: int) -> Counted:
    return Counted(torch.arange(num_rows * 4, dtype=torch.float64).view(1, num_rows, 4))


@pytest.mark.parametrize("budget_rows", [0, 1, 2, 3, 7, 100])
def test_parts_of_any_size_are_the_rows_themselves(budget_rows: int) -> None:
    """Units of no row to several, in blocks of some of them, cut anywhere; also read again, or out of the block."""
    generator = torch.Generator().manual_seed(budget_rows)
    for _ in range(50):
        lengths = torch.randint(0, 4, (12,), generator=generator)
        begins = [0, *lengths.cumsum(0).tolist()]
        rows = torch.randperm(60, generator=generator)[: begins[-1]]
        logits = source(60)
        ahead = ReadAhead(logits, rows, WIDTH, begins)
        first, last = sorted(torch.randint(0, 13, (2,), generator=generator).tolist())
        ahead.begin(slice(first, last), budget_rows * ROW_BYTES)
        cuts = sorted({first, last, *torch.randint(first, last + 1, (4,), generator=generator).tolist()})
        parts = [slice(*pair) for pair in pairwise(cuts)]
        for part in (*parts, slice(0, 12), *parts[1:]):
            expected = TensorLogits(logits.leaves[0]).read(rows[begins[part.start] : begins[part.stop]], WIDTH)
            assert torch.equal(ahead.of(part), expected)


def test_each_row_is_read_once_and_none_beyond_the_block() -> None:
    """Bug: rows of the parts that other processes of a share compute."""
    logits = source(20)
    ahead = ReadAhead(logits, torch.arange(20), WIDTH)
    ahead.begin(slice(2, 17), 6 * ROW_BYTES)
    for start in range(2, 17, 4):
        ahead.of(slice(start, min(start + 4, 17)))
    assert logits.counts == [6, 6, 3]


def test_what_is_there_is_read_where_it_is() -> None:
    logits = TensorLogits(torch.rand(1, 8, WIDTH))
    ahead = ReadAhead(logits, torch.arange(8), WIDTH)
    ahead.begin(slice(0, 8), 10**6)
    assert ahead.of(slice(2, 5)).data_ptr() == logits.leaves[0][0, 2].data_ptr()


def test_what_a_group_reads_together_is_not_read_ahead() -> None:
    """Its processes would not read equally often, and wait for each other."""
    logits = source(8)
    logits.share = (0, 2)
    ahead = ReadAhead(logits, torch.arange(8), WIDTH)
    ahead.begin(slice(0, 8), 10**6)
    ahead.of(slice(0, 2))
    assert logits.counts == [2]


@pytest.mark.parametrize("budget", [ROW_BYTES, 8 * ROW_BYTES, 64 * ROW_BYTES])
def test_both_sides_share_one_budget(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of the student's rows and what is held of the teacher's are no more than one chunk, and as wide as can
    be; the loss and its gradient do not depend on it."""
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", budget)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 20, 5, generator=generator, dtype=torch.float64).requires_grad_()
    student = HeadLogits(hidden, Head(torch.randn(WIDTH, 5, generator=generator, dtype=torch.float64)))
    logits = source(20)
    ahead = ReadAhead(logits, torch.arange(20), WIDTH)

    def loss_of(rows: Tensor, part: slice) -> Tensor:
        return (rows * ahead.of(part)).sum(1)

    term = Term(torch.arange(20), loss_of, unit_cells(20, 1), WIDTH, chunk_size=3, ahead=ahead)
    most = max(1, budget // (2 * ROW_BYTES))
    assert max(len(block.rows) for block in blocks(student, [term])) <= max(3, most + 2)

    total = blockwise_sum(student, [term], [1.0]).total

    assert max(logits.counts) <= max(3, most)
    assert len(logits.counts) <= -(-20 // max(1, most)) + 20 // 3 + 1
    made = hidden @ student.head.weight.t()
    expected = (made[0] * logits.leaves[0][0, :, :WIDTH]).sum()
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    (ours,), (theirs,) = (torch.autograd.grad(each, hidden) for each in (total, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
