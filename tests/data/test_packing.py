"""Windows packed into rows by the student's lengths: complete, within the limit, and with little room left."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.data.order import packed_rows
from nemo_opd.data.text import window_edges

SEGMENTS = st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 60)


def best_fit_decreasing(lengths: list[int], limit: int) -> list[list[int]]:
    """Pack rows with the plain algorithm, as an oracle."""
    rows: list[list[int]] = []

    def room(row: list[int]) -> int:
        return limit - sum(lengths[i] for i in row)

    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        having_room = [row for row in rows if lengths[i] <= room(row)]
        if having_room:
            min(having_room, key=room).append(i)
        else:
            rows.append([i])
    return rows


@settings(max_examples=100)
@given(*SEGMENTS)
def test_rows_are_those_of_best_fit_decreasing(lengths: list[int], limit: int) -> None:
    """Compare row lengths: the choice between rows with equal room does not affect these."""
    rows = packed_rows(np.array(lengths), limit)

    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert np.array(lengths)[row].sum() <= limit
        assert list(row) == sorted(row)
    expected = best_fit_decreasing(lengths, limit)
    assert sorted(sum(lengths[i] for i in row) for row in rows) == sorted(
        sum(lengths[i] for i in row) for row in expected
    )


def test_rows_of_web_pages_have_hardly_room_left() -> None:
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(np.log(400), 1.2, 4096)).astype(int), 1, 2048)

    assert lengths.sum() / (len(packed_rows(lengths, 2048)) * 2048) > 0.99


@settings(max_examples=200)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(2, 12), st.data())
def test_windows_are_as_long_as_they_can_be(begins: list[bool], limit: int, data: st.DataObject) -> None:
    """Bugs: a window above the limit; an edge inside a character although an earlier token begins one; a lost token."""
    opening = data.draw(st.integers(0, limit - 1))
    edges = window_edges(np.array(begins), limit, opening)

    assert (edges[0], edges[-1]) == (0, len(begins))
    for k, (begin, end) in enumerate(pairwise(edges)):
        room = limit - (opening if k else 0)
        assert 0 < end - begin <= room
        if end < len(begins):
            allowed = [i for i, is_begin in enumerate(begins) if is_begin and begin < i <= begin + room]
            assert end == (allowed[-1] if allowed else begin + room)


def test_an_empty_document_is_one_window() -> None:
    assert window_edges(np.zeros(0, np.bool_), 5, 0) == [0, 0]
