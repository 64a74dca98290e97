"""Plans of a student rank's reads: the rows and columns of teacher buffers."""

import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.distributed.layout import Layout
from nemo_opd.handoff.slices import (
    BufferSlice,
    LayoutPair,
    head_pieces,
    output_pieces,
    output_shards,
    reading_ranks,
    vocabulary_columns,
)
from tests.handoff.places import colocated, filled
from tests.handoff.plan_oracle import Case, cases, check, nearest


@given(case=cases(replicated=False))
@settings(max_examples=60)
def test_logits_are_read_cell_by_cell_as_the_oracle_says(case: Case) -> None:
    shards = output_shards(case.sides.teacher, case.lengths, case.columns)
    assert shards == case.shards()
    check(case, output_pieces(case.sides, shards, case.lengths))


@given(case=cases(replicated=True))
@settings(max_examples=60)
def test_hidden_states_are_read_from_the_nearest_rank_that_has_them(case: Case) -> None:
    check(case, output_pieces(case.sides, case.shards(), case.lengths))


@given(case=cases(replicated=False))
@settings(max_examples=40)
def test_a_head_is_one_row_that_every_data_and_context_parallel_rank_has(case: Case) -> None:
    """Shards are read in the order of columns, each from the nearest rank that has it."""
    sides = case.sides
    for student_rank, pieces in enumerate(head_pieces(sides, case.columns)):
        assert [column for piece in pieces for column in piece.columns] == list(range(case.num_columns))
        for piece in pieces:
            t = sides.teacher.coordinates(piece.rank)[2]
            same = [
                rank
                for rank in range(sides.teacher.size)
                if case.columns[sides.teacher.coordinates(rank)[2]] == case.columns[t]
            ]
            assert piece.columns == case.columns[t]
            assert piece.rank in nearest(sides, student_rank, same)


@pytest.mark.parametrize("layout", [Layout(4), Layout(2, 1, 2), Layout(1, 1, 4)])
def test_equal_layouts_read_one_piece_from_their_own_device(layout: Layout) -> None:
    """Bug: a window of several pieces, which must be copied; one piece is a view."""
    sides = colocated(layout, layout, ranks_per_node=2)

    by_student = output_pieces(sides, output_shards(layout, [1] * 8, [range(5)] * layout.tp), [1] * 8)

    own_rows = range(8 // layout.dp)
    assert by_student == [[BufferSlice(rank, own_rows, own_rows, range(5))] for rank in range(layout.size)]


def test_shards_of_a_head_are_read_from_the_own_device_then_the_own_node() -> None:
    """Bug: all ranks read the head of rank 0, which crosses nodes and loads one link."""
    layout = Layout(2, 1, 2)
    by_student = head_pieces(colocated(layout, layout, ranks_per_node=2), vocabulary_columns(5, 2))

    assert [[piece.rank for piece in pieces] for pieces in by_student] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert reading_ranks(by_student, 4) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_an_empty_shard_of_the_vocabulary_is_not_read() -> None:
    sides = colocated(Layout(3), Layout(1, 1, 3), ranks_per_node=3)

    by_student = head_pieces(sides, vocabulary_columns(4, 3))

    assert reading_ranks(by_student, 3) == [(0, 1, 2), (0, 1, 2), ()]


def test_batches_that_do_not_divide_are_read_from_both_sides_of_a_cut() -> None:
    sides = LayoutPair(Layout(3), Layout(2), filled(3, 8), filled(2, 8, first=3))
    one = range(1)

    by_student = output_pieces(sides, output_shards(Layout(2), [1] * 6, [one]), [1] * 6)

    assert by_student == [
        [BufferSlice(0, range(2), range(2), one)],
        [BufferSlice(0, range(2, 3), range(1), one), BufferSlice(1, range(1), range(1, 2), one)],
        [BufferSlice(1, range(1, 3), range(2), one)],
    ]


def test_a_plan_is_small_to_send() -> None:
    teacher = Layout(4, 1, 2)
    sides = colocated(Layout(8), teacher, ranks_per_node=8)

    by_student = output_pieces(sides, output_shards(teacher, [4096] * 64, [range(2560)] * 2), [4096] * 64)

    assert pickle.loads(pickle.dumps(by_student)) == by_student
    assert len(pickle.dumps(by_student[0])) < 1000


@pytest.mark.parametrize("layout", [lambda n: Layout(n), lambda n: Layout(n // 8, 1, 8)], ids=["dp", "tp 8"])
def test_twice_the_ranks_are_twice_the_work(layout: Callable[[int], Layout]) -> None:
    """Bug: each rank of the student goes through all ranks of the teacher in every step."""

    def plan(num_ranks: int) -> None:
        sides = colocated(Layout(num_ranks), layout(num_ranks), ranks_per_node=8)
        lengths, columns = [7] * 2 * num_ranks, vocabulary_columns(1024, sides.teacher.tp)
        for widths in (columns, [range(5)] * sides.teacher.tp):
            output_pieces(sides, output_shards(sides.teacher, lengths, widths), lengths)
        reading_ranks(head_pieces(sides, columns), num_ranks)

    assert lines_of(plan, 512) < 2.2 * lines_of(plan, 256)


def lines_of(function: Callable[[int], None], argument: int) -> int:
    """Count the executed lines; a comprehension counts once per item."""
    count = 0

    def note(_: object, event: str, __: object) -> Any:
        nonlocal count
        count += event == "line"
        return note

    trace = sys.gettrace()
    sys.settrace(note)
    try:
        function(argument)
    finally:
        sys.settrace(trace)
    return count


@given(vocab_size=st.integers(1, 40), tp=st.integers(1, 9))
def test_columns_are_cut_as_dtensor_does(vocab_size: int, tp: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(vocab_size).chunk(tp)]

    columns = [list(shard) for shard in vocabulary_columns(vocab_size, tp)]

    assert columns == [*chunks, *[[]] * (tp - len(chunks))]
