"""What is random depends on the place in the run alone."""

from itertools import product

import numpy as np
import pytest

from nemo_opd.rollout.collect import chosen_share, turn_seed


def test_seeds_differ_in_every_part_and_fit() -> None:
    """Catches SeedSequence's padding, by which [1] and [1, 0] are one seed, and seeds that engines refuse."""
    places = list(product((0, 1, 2**32, 2**40), (0, 1), (0, 1, 2), (0, 1), (0, 1)))
    seeds = [turn_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [turn_seed(*place) for place in places]


@pytest.mark.parametrize(("share", "number"), [(0.0, {0}), (1.0, {5}), (0.5, {2, 3})])
def test_a_share_is_of_each_batch_and_right_on_average(share: float, number: set[int]) -> None:
    chosen = [chosen_share("abcde", share, 3, step) for step in range(2000)]
    assert {sum(batch) for batch in chosen} == number
    # 10,000 draws of variance at most 1/4 each: five standard deviations are 0.025.
    assert abs(np.mean(chosen) - share) < 0.025
    assert (np.abs(np.mean(chosen, axis=0) - share) < 0.06).all()
    assert chosen[3] == chosen_share("abcde", share, 3, 3)
