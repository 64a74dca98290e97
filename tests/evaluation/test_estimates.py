"""Catches a biased estimator, ties that go to the wrong answer, and intervals that do not cover."""

import math
from itertools import combinations, product
from statistics import fmean

import numpy as np
import pytest

from nemo_opd.evaluation import estimates as module
from nemo_opd.evaluation.estimates import (
    Estimate,
    bootstrap,
    maj_at_k,
    mean_with_interval,
    paired_difference,
    pass_at_k,
    subsets,
    wilson,
)


@pytest.mark.parametrize(("num_correct", "n", "k"), [(0, 5, 2), (1, 5, 1), (2, 5, 2), (3, 6, 4), (5, 5, 3), (4, 6, 3)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(num_correct: int, n: int, k: int) -> None:
    right = [i < num_correct for i in range(n)]

    assert pass_at_k(num_correct, n, k) == pytest.approx(fmean(any(chosen) for chosen in combinations(right, k)))
    assert pass_at_k(num_correct, n, 1) == fmean(right), "tables leave out an equal mean"


def test_pass_at_k_is_unbiased() -> None:
    """Over all outcomes of n = 5 answers that are right with p = 0.3, the mean is 1 − 0.7^k."""
    outcomes = list(product([0, 1], repeat=5))
    for k in (1, 3):
        mean = sum(pass_at_k(sum(one), 5, k) * 0.3 ** sum(one) * 0.7 ** (5 - sum(one)) for one in outcomes)
        assert mean == pytest.approx(1 - 0.7**k)


def majority_oracle(votes: list[str | None], right: dict[str, bool], k: int) -> float:
    def elected(chosen: tuple[str | None, ...]) -> bool:
        counts: dict[str, int] = {}
        for vote in chosen:
            if vote is not None:
                counts[vote] = counts.get(vote, 0) + 1
        return bool(counts) and right[max(counts, key=lambda vote: counts[vote])]  # max keeps the first of equals

    return fmean(elected(chosen) for chosen in combinations(votes, k))


VOTES: list[list[str | None]] = [
    ["a", "b", "a", "c", "b", "b"],
    ["b", "a", None, "a", None, "c"],
    [None, None, "b", None, "a", None],
    ["c", "c", "c", "c", "c", "c"],
]


@pytest.mark.parametrize("votes", VOTES)
@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_maj_at_k_is_the_share_of_choices_whose_winner_is_right(votes: list[str | None], k: int) -> None:
    right = {"a": True, "b": False, "c": True}
    correct = [vote is not None and right[vote] for vote in votes]

    assert maj_at_k(votes, correct, k) == pytest.approx(majority_oracle(votes, right, k))


def test_nobody_votes() -> None:
    assert maj_at_k([None, None], [False, False], 2) == 0


def test_maj_at_1_is_pass_at_1_where_all_answer() -> None:
    votes, correct = ["a", "b", "b", "c"], [True, False, False, False]

    assert maj_at_k(votes, correct, 1) == pass_at_k(1, 4, 1)


def test_more_choices_than_are_looked_at_are_sampled() -> None:
    votes = (["a", "b", "c", "a", "b", "a", None, "b"] * 2)[:14]
    correct = [vote == "a" for vote in votes]
    exact = majority_oracle(votes, {"a": True, "b": False, "c": False}, 7)  # C(14, 7) = 3432
    assert len(subsets(14, 7, 0)) == module.MAX_SUBSETS
    drawn = maj_at_k(votes, correct, 7, seed=1)

    assert drawn == maj_at_k(votes, correct, 7, seed=1)
    assert drawn == pytest.approx(exact, abs=5 * 0.5 / module.MAX_SUBSETS**0.5)  # five standard errors


def test_sampled_choices_are_choices() -> None:
    drawn = subsets(40, 20, 3)

    assert (np.diff(drawn, axis=1) > 0).all()  # increasing, so that none is taken twice
    assert drawn.min() == 0
    assert drawn.max() == 39


@pytest.mark.parametrize(
    ("right", "questions", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)],
)
def test_wilson_gives_published_intervals(right: int, questions: int, low: float, high: float) -> None:
    """The last two are in Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I."""
    found = wilson(right, questions, 0.95)

    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert found.low <= found.value <= found.high


def test_the_bootstrap_agrees_with_the_normal_interval_of_many_questions() -> None:
    values = np.random.default_rng(5).random(400)
    found = bootstrap(list(values), 0.9)
    half = 1.6449 * values.std() / 20

    assert found.value == pytest.approx(values.mean())
    # The quantiles of 2000 resampled means have a standard error of about 4 % of that half width.
    assert (found.low, found.high) == (
        pytest.approx(values.mean() - half, abs=0.2 * half),
        pytest.approx(values.mean() + half, abs=0.2 * half),
    )
    assert found == bootstrap(list(values), 0.9)


def test_right_or_wrong_has_wilsons_interval_and_all_else_the_bootstrap() -> None:
    assert mean_with_interval([1.0, 1.0, 1.0], 0.95) == wilson(3, 3, 0.95)
    # Resampling one question finds that question: an interval without a width.
    assert mean_with_interval([0.25], 0.95) == wilson(0.25, 1, 0.95)
    assert mean_with_interval([0.25, 0.25], 0.95) == wilson(0.5, 2, 0.95)
    assert mean_with_interval([3.0], 0.95) == Estimate(3.0, 3.0, 3.0)
    assert mean_with_interval([0.5, 1.0, 0.0], 0.95) == bootstrap([0.5, 1.0, 0.0], 0.95)
    assert mean_with_interval([-1.0, 1.0, 1.0], 0.95) == bootstrap([-1.0, 1.0, 1.0], 0.95)


def test_a_paired_difference_by_hand() -> None:
    """Bonett & Price: of 20 questions 5 were won and 1 lost; proportions of 22 questions of which 6 and 2 are."""
    before = [0.0] * 5 + [1.0] + [1.0] * 10 + [0.0] * 4
    after = [1.0] * 5 + [0.0] + [1.0] * 10 + [0.0] * 4
    won, lost = 6 / 22, 2 / 22
    half = 1.959964 * math.sqrt((won + lost - (won - lost) ** 2) / 22)
    found = paired_difference(after, before, 0.95)

    assert found.value == pytest.approx(4 / 20)
    assert (found.low, found.high) == (
        pytest.approx(won - lost - half, rel=1e-6),
        pytest.approx(won - lost + half, rel=1e-6),
    )
    all_won = paired_difference([1.0] * 10, [0.0] * 10, 0.95)
    assert 0.5 < all_won.low < all_won.high <= all_won.value == 1
    assert paired_difference([3.0], [1.0], 0.95) == Estimate(2.0, -math.inf, math.inf)


def test_answers_that_have_not_changed_leave_a_width() -> None:
    """Bug: ± 0.0 points of ten questions, as if more questions would find no change either."""
    found = paired_difference([1.0] * 10, [1.0] * 10, 0.95)
    assert found.value == 0
    assert 0.1 < found.high < 0.4


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_a_paired_interval_covers_as_promised(confidence: float) -> None:
    """Bug: the interval of unpaired shares, which is wider by far where answers agree."""
    random = np.random.default_rng(0)
    covered, widths, trials = 0, [], 2_000
    for _ in range(trials):
        easy = random.random(60)
        before, after = (easy < 0.5).astype(float), (easy + 0.1 * random.standard_normal(60) < 0.6).astype(float)
        found = paired_difference(after.tolist(), before.tolist(), confidence)
        covered += found.low <= 0.1 <= found.high
        widths.append(found.high - found.low)
    assert covered / trials >= confidence - 0.03
    unpaired = 2 * 1.96 * math.sqrt(2 * 0.25 / 60)
    assert np.mean(widths) < unpaired * 0.75
