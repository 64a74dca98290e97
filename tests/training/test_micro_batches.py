"""Sequences are balanced over ranks and cut into microbatches within a token budget."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_opd.cluster.batch_grid import dealt, micro_batches
from nemo_opd.rotary import RotaryLimit

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=24)


@given(lengths=LENGTHS, parts=st.integers(1, 5))
def test_dealing_is_an_order_with_the_longest_first_in_each_part(lengths: list[int], parts: int) -> None:
    size = -(-len(lengths) // parts)
    sizes = [max(0, min(size, len(lengths) - part * size)) for part in range(parts)]

    order = dealt([[length] for length in lengths], sizes)

    assert sorted(order) == list(range(len(lengths)))
    for start, stop in pairwise(accumulate(sizes, initial=0)):
        part_lengths = [lengths[index] for index in order[start:stop]]
        assert part_lengths == sorted(part_lengths, reverse=True)


def test_no_rank_has_much_more_than_its_share() -> None:
    """Bug: dealing by count alone gives the first of these two ranks twice the tokens of the second."""
    lengths = [900] * 4 + [450] * 4 + [100] * 8

    order = dealt([[length] for length in lengths], [8, 8])

    first, second = (sum(lengths[index] for index in part) for part in (order[:8], order[8:]))
    assert first == second


def test_attention_over_long_sequences_counts() -> None:
    """Bug: dealing by tokens alone gives a rank with one long sequence as many tokens as a rank with short ones."""
    lengths = [65_536, *[8_192] * 12, *[1] * 13]
    order = dealt([[length] for length in lengths], [13, 13])
    with_the_longest = order[:13] if 0 in order[:13] else order[13:]
    assert sum(lengths[index] == 8_192 for index in with_the_longest) == 0


@given(
    by_rank=st.integers(1, 12).flatmap(
        lambda size: st.lists(st.lists(st.integers(1, 40), min_size=size, max_size=size), min_size=1, max_size=4)
    ),
    budget=st.integers(2, 100),
    is_packed=st.booleans(),
)
def test_microbatches_are_consecutive_fit_and_are_equally_many(
    by_rank: list[list[int]], budget: int, is_packed: bool
) -> None:
    cuts_by_rank = micro_batches(by_rank, budget, is_packed=is_packed)

    assert len({len(cuts) for cuts in cuts_by_rank}) == 1
    for lengths, cuts in zip(by_rank, cuts_by_rank, strict=True):
        assert [index for cut in cuts for index in range(cut.start, cut.stop)] == list(range(len(lengths)))
        for cut in cuts:
            cut_lengths = lengths[cut]
            assert cut_lengths
            tokens = sum(cut_lengths) if is_packed else len(cut_lengths) * max(cut_lengths)
            assert tokens <= budget or len(cut_lengths) == 1


@pytest.mark.parametrize(("is_packed", "number"), [(True, 1), (False, 2)])
def test_padding_counts_unless_rows_are_packed(is_packed: bool, number: int) -> None:
    (cuts,) = micro_batches([[100, 20, 20, 20, 20, 20]], 200, is_packed=is_packed)
    assert len(cuts) == number


def test_sequences_of_one_microbatch_are_on_one_side_of_a_rotary_limit() -> None:
    """Catches short texts that get the rotary factors of a long text in the same microbatch."""
    limit = RotaryLimit(30, grows=False)
    first, second = micro_batches([[40, 31, 30, 5], [9, 9, 9, 9]], 1_000, is_packed=True, rotary=limit)
    assert first == [slice(0, 2), slice(2, 4)]
    assert len(second) == 2


def test_indices_of_many_short_sequences_stay_small() -> None:
    """Bug: a long sequence beside thousands of one-token sequences makes a padded index of gigabytes."""
    (cuts,) = micro_batches([[1_000, *[1] * 1_000]], 2_000, is_packed=True)
    assert cuts[0].stop * 1_000 <= 16 * 2_000
