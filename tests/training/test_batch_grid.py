"""Every group of ranks reads each row of a batch once, and in the metrics every row counts once."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.cluster.batch_grid import BatchGrid, dp_leader_ranks, reduced, shared_out
from nemo_opd.data.collate import row_ids
from nemo_opd.distributed.layout import Layout
from nemo_opd.types import Batch, Last, Max, Mean, Metrics, Sum, TeacherRows, TokenRows

LAYOUTS = [Layout(1), Layout(2), Layout(3, tp=2), Layout(2, cp=2), Layout(1, cp=2, tp=2), Layout(4, cp=3, tp=2)]


def batch_of(num_rows: int) -> Batch:
    """Return a batch whose row b has length b + 1 and ids b + 1."""
    lengths = torch.arange(1, num_rows + 1)
    mask = torch.arange(num_rows)[None] < lengths[:, None]
    tokens = TokenRows(lengths[:, None].expand(-1, num_rows).contiguous(), lengths, mask, mask.int())
    return Batch(tokens, (TeacherRows(tokens, None),))


@pytest.mark.parametrize("student", LAYOUTS)
@pytest.mark.parametrize("teacher", LAYOUTS)
@pytest.mark.parametrize("num_rows", [1, 7, 12])
def test_every_group_reads_the_same_rows_in_order(student: Layout, teacher: Layout, num_rows: int) -> None:
    """Bugs: rows divided over tp ranks; groups that pad differently."""
    grid = BatchGrid(student, (teacher,))
    batch = batch_of(num_rows)
    total = len(grid.padded(batch))
    for group in (student, teacher):
        parts = grid.by_rank(batch, group)
        assert len(parts) == group.size
        assert {len(part) for part in parts} == {total // group.dp}
        by_index = [set() for _ in range(group.dp)]
        for rank, part in enumerate(parts):
            by_index[rank // (group.cp * group.tp)].add(tuple(part.student.lengths.tolist()))
        assert all(len(rows) == 1 for rows in by_index), "ranks that differ in cp or tp alone have the same rows"
        in_order = [length for rows in by_index for part in rows for length in part]
        assert in_order == [*range(1, num_rows + 1), *[0] * (total - num_rows)]
    assert total - num_rows < math.lcm(student.dp, teacher.dp)


@pytest.mark.parametrize("num_rows", [1, 7, 12])
def test_balanced_rows_are_the_same_rows(num_rows: int) -> None:
    """Bug: ids, lengths, weights or teacher rows that no longer belong to the same text."""
    grid = BatchGrid(Layout(2), (Layout(3),))
    batch = batch_of(num_rows)
    batch = replace(batch, teachers=(replace(batch.teachers[0], weights=batch.student.lengths.float()),))

    balanced = grid.balanced(batch)

    assert sorted(balanced.student.lengths.tolist()) == list(range(1, num_rows + 1))
    (teacher,) = balanced.teachers
    assert torch.equal(balanced.student.ids[:, 0], balanced.student.lengths)
    assert torch.equal(teacher.tokens.lengths, balanced.student.lengths)
    assert torch.equal(teacher.weights, balanced.student.lengths.float())
    assert len(grid.padded(balanced)) == len(grid.padded(batch))


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12), student=st.integers(1, 4), teacher=st.integers(1, 3))
def test_packed_rows_stay_together_and_ranks_have_equally_many(sizes: list[int], student: int, teacher: int) -> None:
    """Bugs: a row on two ranks, a rank with fewer sequences than another, padding counted as a sequence."""
    grid = BatchGrid(Layout(student), (Layout(teacher),))
    batch = replace(batch_of(sum(sizes)), row=row_ids(sizes))
    row_of_length = dict(zip(batch.student.lengths.tolist(), row_ids(sizes).tolist(), strict=True))

    balanced = grid.balanced(batch)

    assert balanced.row is not None
    assert balanced.row.tolist() == row_ids(balanced.row.bincount().tolist()).tolist(), "numbered from 0, in order"
    lengths = balanced.student.lengths.tolist()
    assert sorted(lengths) == list(range(1, sum(sizes) + 1))
    assert len({(row_of_length[n], row) for n, row in zip(lengths, balanced.row.tolist(), strict=True)}) == len(sizes)
    is_given = grid.is_given(balanced)
    assert grid.padded(balanced).student.lengths[is_given].tolist() == lengths
    assert not grid.padded(balanced).student.lengths[~is_given].any()
    for group in (Layout(student), Layout(teacher)):
        parts = grid.by_rank(balanced, group)
        assert len({len(part) for part in parts}) == 1
        held = [{row_of_length[n] for n in part.student.lengths.tolist() if n} for part in parts]
        assert sum(map(len, held)) == len(sizes)
        assert max(map(len, held)) <= -(-len(sizes) // grid.unit) * grid.unit // group.dp


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_counts_once_and_a_maximum_is_of_all_ranks(layout: Layout) -> None:
    """Bug: sums that grow by tp · cp, because all ranks of a data-parallel index report the same rows."""
    by_rank: list[Metrics] = []
    for rank in range(layout.size):
        d = rank // (layout.cp * layout.tp)
        by_rank.append({"ce": Mean(10.0 * d, 2), "tokens": Sum(d + 1), "memory": Max(rank), "lr": Last(0.5)})
    metrics = reduced(by_rank, layout)
    assert metrics["ce"] == Mean(10.0 * sum(range(layout.dp)), 2 * layout.dp)
    assert metrics["tokens"] == Sum(sum(range(1, layout.dp + 1)))
    assert metrics["memory"] == Max(layout.size - 1)
    assert metrics["lr"] == Last(0.5)


def test_a_maximum_that_a_leader_does_not_report_is_kept() -> None:
    assert reduced([{}, {"phase/loss": Max(2.0)}], Layout(1, tp=2)) == {"phase/loss": Max(2.0)}


def test_leaders_are_the_first_of_each_data_parallel_index() -> None:
    assert dp_leader_ranks(Layout(3, cp=2, tp=2)) == [0, 4, 8]


@pytest.mark.parametrize("number", [0, 1, 7, 12])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_item_is_with_one_data_parallel_index_and_all_of_its_ranks(number: int, layout: Layout) -> None:
    by_rank = shared_out(range(number), layout)

    assert [item for rank in dp_leader_ranks(layout) for item in by_rank[rank]] == list(range(number))
    assert len(by_rank) == layout.size
    for rank, items in enumerate(by_rank):
        assert items == by_rank[dp_leader_ranks(layout)[layout.coordinates(rank)[0]]]
        assert abs(len(items) - number / layout.dp) < 1
