"""Windows cut and put into rows by their lengths: nothing is lost, nothing is too long, little room is left."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.data.order import packed_rows
from nemo_opd.data.text import common_places, window_edges

SEGMENTS = st.integers(1, 3).flatmap(
    lambda models: st.tuples(
        st.lists(st.lists(st.integers(1, 20), min_size=models, max_size=models), min_size=1, max_size=40),
        st.lists(st.integers(20, 60), min_size=models, max_size=models),
    )
)


def by_size(lengths: list[list[int]], limits: list[int]) -> list[int]:
    """The largest share of a limit first."""
    return sorted(
        range(len(lengths)), key=lambda i: -max(n / limit for n, limit in zip(lengths[i], limits, strict=True))
    )


def best_fit_decreasing(lengths: list[list[int]], limits: list[int]) -> list[list[int]]:
    """Written for reading."""
    rows: list[list[int]] = []

    def room(row: list[int]) -> list[int]:
        return [limit - sum(lengths[i][m] for i in row) for m, limit in enumerate(limits)]

    for i in by_size(lengths, limits):
        having_room = [row for row in rows if all(n <= left for n, left in zip(lengths[i], room(row), strict=True))]
        if having_room:
            min(having_room, key=lambda row: room(row)[0]).append(i)
        else:
            rows.append([i])
    return rows


@settings(max_examples=100)
@given(case=SEGMENTS)
def test_rows_are_those_of_best_fit_decreasing(case: tuple[list[list[int]], list[int]]) -> None:
    """Which of two rows with equal room is taken does not matter to their number or to the room left."""
    lengths, limits = case

    rows = packed_rows(np.array(lengths), limits)

    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert (np.array(lengths)[row].sum(0) <= limits).all()
        assert list(row) == sorted(row)
    if len(limits) == 1:
        expected = best_fit_decreasing(lengths, limits)
        assert sorted(sum(lengths[i][0] for i in row) for row in rows) == sorted(
            sum(lengths[i][0] for i in row) for row in expected
        )


@settings(max_examples=100)
@given(case=SEGMENTS)
def test_each_segment_goes_where_it_leaves_least_room(case: tuple[list[list[int]], list[int]]) -> None:
    """For the student, among the rows that have room for every model; a new row only where none has."""
    lengths, limits = case
    row_of = {int(i): number for number, row in enumerate(packed_rows(np.array(lengths), limits)) for i in row}
    room: dict[int, list[int]] = {}

    for i in by_size(lengths, limits):
        left = {
            row: after
            for row, before in room.items()
            if min(after := [have - n for have, n in zip(before, lengths[i], strict=True)]) >= 0
        }
        own = row_of[i]
        assert (own in left) == bool(left)
        if left:
            assert left[own][0] == min(after[0] for after in left.values())
        room[own] = left.get(own, [limit - n for limit, n in zip(limits, lengths[i], strict=True)])


def test_rows_of_web_pages_have_hardly_room_left() -> None:
    """For the student and for a teacher with other lengths, both of them limits."""
    draw = np.random.default_rng(0)
    student = np.clip(np.exp(draw.normal(np.log(400), 1.2, 4096)).astype(int), 1, 2048)
    teacher = np.clip((student * draw.uniform(0.9, 1.1, 4096)).astype(int), 1, 2048)

    alone = packed_rows(student[:, None], (2048,))
    both = packed_rows(np.stack([student, teacher], 1), (2048, 2048))

    assert student.sum() / (len(alone) * 2048) > 0.99
    assert max(student.sum(), teacher.sum()) / (len(both) * 2048) > 0.97


PLACES = st.integers(1, 3).flatmap(
    lambda models: st.tuples(
        st.lists(
            st.lists(st.integers(0, 6), min_size=models, max_size=models).filter(any), min_size=1, max_size=30
        ).map(lambda steps: np.concatenate([np.zeros((1, models), int), np.cumsum(steps, 0)])),
        st.lists(st.integers(3, 12), min_size=models, max_size=models),
        st.lists(st.integers(0, 2), min_size=models, max_size=models),
    )
)


@settings(max_examples=200)
@given(case=PLACES)
def test_windows_are_as_long_as_they_can_be(case: tuple[np.ndarray, list[int], list[int]]) -> None:
    places, limits, openings = case

    edges = window_edges(places, limits, openings)

    assert edges[0].tolist() == places[0].tolist()
    assert edges[-1].tolist() == places[-1].tolist()
    known = places.tolist()
    for k, (begin, end) in enumerate(itertools.pairwise(edges)):
        room = np.array(limits) - (np.array(openings) if k else 0)
        assert (end >= begin).all()
        assert (end > begin).any()
        assert (end - begin <= room).all()
        if end.tolist() in known[:-1] and begin.tolist() in known:
            following = places[known.index(end.tolist()) + 1]
            assert (following - begin > room).any(), "a window that could be longer"
    inside = [edge for edge in edges.tolist() if edge not in known]
    assert not inside or (np.diff(places, axis=0) > np.array(limits) - np.array(openings)).any()


def test_what_has_no_common_place_is_cut_into_equal_parts() -> None:
    """One letter many times, which one side reads as one token."""
    places = np.array([[0, 0], [2, 2], [102, 3], [104, 5]])

    edges = window_edges(places, [30, 30], [0, 0])

    assert edges.tolist() == [[0, 0], [2, 2], [27, 2], [52, 2], [77, 2], [104, 5]]


def test_common_places_are_where_all_begin_a_token() -> None:
    first = np.array([0, 1, 3, 4], np.int32), np.array([0, 2, 3, 5], np.int32)
    second = np.array([0, 3, 4], np.int32), np.array([1, 2, 6], np.int32)

    places = common_places(6, [first, second], np.array([6, 7, 8]))

    assert places.tolist() == [[0, 0, 0], [0, 0, 1], [3, 3, 2], [4, 5, 6], [6, 7, 8]]


def test_without_another_tokenizer_every_token_is_such_a_place() -> None:
    places = common_places(5, [], np.array([5]))
    assert places.tolist() == [[0], [1], [2], [3], [4], [5]]


@pytest.mark.parametrize("limit", [2, 3, 7])
def test_all_of_a_document_is_in_windows(limit: int) -> None:
    edges = window_edges(common_places(20, [], np.array([20])), [limit], [1])
    assert np.diff(edges[:, 0]).tolist()[0] == limit
    assert set(np.diff(edges[:, 0]).tolist()[1:-1]) <= {limit - 1}
    assert edges[-1, 0] == 20
