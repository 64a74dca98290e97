"""How a dimension is cut among ranks, against torch's own cut and against counting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_opd.errors import ConfigError
from nemo_opd.handoff.shards import chunk_sizes, contiguous, equal_parts, head_tail, joined, vocabulary_columns


@given(size=st.integers(0, 40), parts=st.integers(1, 9))
def test_chunks_are_those_of_dtensor(size: int, parts: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(parts)] if size else []

    assert chunk_sizes(size, parts) == (*chunks, *[0] * (parts - len(chunks)))


@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5), data=st.data())
def test_columns_beyond_the_vocabulary_are_no_ones(sizes: list[int], data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(0, sum(sizes)))
    owners = [t for t, size in enumerate(sizes) for _ in range(size)][:vocab_size]

    columns = vocabulary_columns(sizes, vocab_size)

    assert [[column for column in range(vocab_size) if owners[column] == t] for t in range(len(sizes))] == [
        list(each) for each in columns
    ]


@given(length=st.integers(0, 30), cp=st.integers(1, 5))
def test_contiguous_positions_are_each_rank_s_in_turn(length: int, cp: int) -> None:
    cut = contiguous(length, cp)

    assert [position for ranges in cut for each in ranges for position in each] == list(range(length))
    assert len(cut) == cp


@given(piece=st.integers(1, 4), cp=st.integers(1, 5))
def test_head_and_tail_positions_cost_every_rank_the_same(piece: int, cp: int) -> None:
    """Under a causal mask position p attends to p + 1: the sums must be equal, which no other pairing gives."""
    cut = head_tail(2 * cp * piece, cp)
    positions = [[position for each in ranges for position in each] for ranges in cut]

    assert sorted(position for own in positions for position in own) == list(range(2 * cp * piece))
    assert len({sum(own) for own in positions}) == 1
    assert all(own == sorted(own) for own in positions)
    assert len(cut[-1]) == 1  # the two in the middle are neighbours


def test_what_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"7 rows .* dp=2"):
        equal_parts(7, 2)
    with pytest.raises(ConfigError, match="10 positions"):
        head_tail(10, 2)


def test_neighbouring_ranges_become_one() -> None:
    assert joined((range(2, 4), range(4, 4), range(4, 6), range(7, 8))) == (range(2, 6), range(7, 8))
