"""Rows read ahead: the same rows, in few wide products within the budget."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nemo_opd.logits.blocks import blocks
from nemo_opd.logits.blockwise import blockwise_sum
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import TensorLogits
from nemo_opd.logits.term import ReadAhead, Term, unit_cells

WIDTH = 3
ROW_BYTES = WIDTH * 8


class Counted(TensorLogits):
    """Records the number of rows of each read."""

    is_product = True

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits)
        self.counts: list[int] = []

    def read(self, rows: Tensor, width: int) -> Tensor:
        self.counts.append(len(rows))
        return super().read(rows, width)


def source(num_rows: int) -> Counted:
    return Counted(torch.arange(num_rows * 4, dtype=torch.float64).view(1, num_rows, 4))


@pytest.mark.parametrize("rows_at_once", [0, 1, 2, 3, 7, 100])
def test_parts_of_any_size_are_the_rows_themselves(rows_at_once: int) -> None:
    """Catches wrong rows for units of 0 to 3 rows, parts cut anywhere, repeated reads, and reads outside the block."""
    generator = torch.Generator().manual_seed(rows_at_once)
    for _ in range(50):
        lengths = torch.randint(0, 4, (12,), generator=generator)
        begins = [0, *lengths.cumsum(0).tolist()]
        rows = torch.randperm(60, generator=generator)[: begins[-1]]
        logits = source(60)
        ahead = ReadAhead(logits, rows, WIDTH, begins)
        first, last = sorted(torch.randint(0, 13, (2,), generator=generator).tolist())
        ahead.begin(slice(first, last), rows_at_once)
        cuts = sorted({first, last, *torch.randint(first, last + 1, (4,), generator=generator).tolist()})
        parts = [slice(*pair) for pair in pairwise(cuts)]
        for part in (*parts, slice(0, 12), *parts[1:]):
            expected = TensorLogits(logits.leaves[0]).read(rows[begins[part.start] : begins[part.stop]], WIDTH)
            assert torch.equal(ahead.of(part), expected)


def test_each_row_is_read_once_and_none_beyond_the_block() -> None:
    """Bug: rows are read that belong to other processes of a share."""
    logits = source(20)
    ahead = ReadAhead(logits, torch.arange(20), WIDTH)
    ahead.begin(slice(2, 17), 6)
    for start in range(2, 17, 4):
        ahead.of(slice(start, min(start + 4, 17)))
    assert logits.counts == [6, 6, 3]


def test_what_is_there_is_read_where_it_is() -> None:
    logits = TensorLogits(torch.rand(1, 8, WIDTH))
    ahead = ReadAhead(logits, torch.arange(8), WIDTH)
    ahead.begin(slice(0, 8), 8)
    assert ahead.of(slice(2, 5)).data_ptr() == logits.leaves[0][0, 2].data_ptr()


def test_what_a_group_reads_together_is_not_read_ahead() -> None:
    """Bug: the processes of a group read a different number of times and wait for each other."""
    logits = source(8)
    logits.share = (0, 2)
    ahead = ReadAhead(logits, torch.arange(8), WIDTH)
    ahead.begin(slice(0, 8), 8)
    ahead.of(slice(0, 2))
    assert logits.counts == [2]


@pytest.mark.parametrize("budget", [ROW_BYTES, 8 * ROW_BYTES, 64 * ROW_BYTES])
def test_both_sides_share_one_budget(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: the student's block and the teacher's rows exceed the budget by more than a chunk, or use little of it; the
    loss or its gradient depends on the budget.
    """
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", budget)
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_PRODUCT_ROWS", 1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 20, 5, generator=generator, dtype=torch.float64).requires_grad_()
    student = HeadLogits(hidden, Head(torch.randn(WIDTH, 5, generator=generator, dtype=torch.float64)))
    logits = source(20)
    ahead = ReadAhead(logits, torch.arange(20), WIDTH)

    def loss_of(rows: Tensor, part: slice) -> Tensor:
        return (rows * ahead.of(part)).sum(1)

    term = Term(torch.arange(20), loss_of, unit_cells(20, 1), WIDTH, chunk_size=3, ahead=ahead)
    max_rows = max(1, budget // (2 * ROW_BYTES))
    assert max(len(block.rows) for block in blocks(student, [term])) <= max(3, max_rows + 2)

    total = blockwise_sum(student, [term], [1.0]).total

    assert max(logits.counts) <= max(3, max_rows + 2)
    assert len(logits.counts) <= -(-20 // max(1, max_rows)) + 20 // 3 + 1
    logits_of_student = hidden @ student.head.weight.t()
    expected = (logits_of_student[0] * logits.leaves[0][0, :, :WIDTH]).sum()
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    (gradient,), (expected_gradient,) = (torch.autograd.grad(value, hidden) for value in (total, expected))
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=0)


def test_a_last_step_beyond_the_rows_of_a_block_is_read_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a block of 8 rows grows to the end of its last step of 3, and the teacher's ninth row is read alone."""
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", 1)
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_PRODUCT_ROWS", 8)
    hidden, weight = torch.rand(1, 27, 5, dtype=torch.float64).requires_grad_(), torch.rand(WIDTH, 5).double()
    logits = source(27)
    ahead = ReadAhead(logits, torch.arange(27), WIDTH)

    def loss_of(rows: Tensor, part: slice) -> Tensor:
        return (rows * ahead.of(part)).sum(1)

    term = Term(torch.arange(27), loss_of, unit_cells(27, 1), WIDTH, chunk_size=3, ahead=ahead)
    blockwise_sum(HeadLogits(hidden, Head(weight)), [term], [1.0])
    assert logits.counts == [9, 9, 9]


@pytest.mark.parametrize("rows_at_once", [2, 5, 8, 100])
def test_terms_that_read_the_same_rows_read_them_once(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: validation multiplies by the teacher's head once for the loss and once for the overlap."""
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", 1)
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_PRODUCT_ROWS", rows_at_once)
    hidden, weight = torch.rand(1, 27, 5, dtype=torch.float64).requires_grad_(), torch.rand(WIDTH, 5).double()
    teacher = source(27)

    def term(rows: Tensor, factor: float) -> Term:
        ahead = ReadAhead(teacher, rows, WIDTH)

        def loss_of(student: Tensor, part: slice) -> Tensor:
            return factor * (student * ahead.of(part)).sum(1)

        return Term(torch.arange(27), loss_of, unit_cells(27, 1), WIDTH, chunk_size=2, ahead=ahead)

    rows = torch.arange(27)
    terms = [term(rows, 1.0), term(rows.clone(), 3.0), term(rows.flip(0), 5.0)]
    total = blockwise_sum(HeadLogits(hidden, Head(weight)), terms, [1.0, 1.0, 1.0]).total
    assert sum(teacher.counts) == 2 * 27
    student, logits = (hidden @ weight.t())[0], teacher.leaves[0][0, :, :WIDTH]
    expected = 4 * (student * logits).sum() + 5 * (student * logits.flip(0)).sum()
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
