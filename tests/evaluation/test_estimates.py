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
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(num_correct: int, n: int, k: int) -> None:
    right = [i < num_correct for i in range(n)]

    assert pass_at_k(num_correct, n, k) == pytest.approx(fmean(any(subset) for subset in combinations(right, k)))
    assert pass_at_k(num_correct, n, 1) == fmean(right), "tables leave out an equal mean"


def test_pass_at_k_is_unbiased() -> None:
    """The mean over all outcomes of 5 answers, each right with probability 0.3, is 1 − 0.7^k."""
    outcomes = list(product([0, 1], repeat=5))
    for k in (1, 3):
        mean = sum(
            pass_at_k(sum(outcome), 5, k) * 0.3 ** sum(outcome) * 0.7 ** (5 - sum(outcome)) for outcome in outcomes
        )
        assert mean == pytest.approx(1 - 0.7**k)


def majority_oracle(votes: list[str | None], right: dict[str, bool], k: int) -> float:
    def elected(subset: tuple[str | None, ...]) -> bool:
        counts: dict[str, int] = {}
        for vote in subset:
            if vote is not None:
                counts[vote] = counts.get(vote, 0) + 1
        return bool(counts) and right[max(counts, key=lambda vote: counts[vote])]  # max keeps the first of equals

    return fmean(elected(subset) for subset in combinations(votes, k))


VOTES: list[list[str | None]] = [
    ["a", "b", "a", "c", "b", "b"],
    ["b", "a", None, "a", None, "c"],
    [None, None, "b", None, "a", None],
    ["c", "c", "c", "c", "c", "c"],
    [None] * 6,
]


@pytest.mark.parametrize("votes", VOTES)
@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_maj_at_k_is_the_share_of_subsets_with_a_right_winner(votes: list[str | None], k: int) -> None:
    right = {"a": True, "b": False, "c": True}
    correct = [vote is not None and right[vote] for vote in votes]

    assert maj_at_k(votes, correct, k) == pytest.approx(majority_oracle(votes, right, k))


def test_too_many_subsets_are_sampled() -> None:
    votes = (["a", "b", "c", "a", "b", "a", None, "b"] * 2)[:14]
    correct = [vote == "a" for vote in votes]
    exact = majority_oracle(votes, {"a": True, "b": False, "c": False}, 7)  # C(14, 7) = 3432
    assert len(subsets(14, 7, 0)) == module.MAX_SUBSETS
    drawn = maj_at_k(votes, correct, 7, seed=1)

    assert drawn == maj_at_k(votes, correct, 7, seed=1)
    assert drawn == pytest.approx(exact, abs=5 * 0.5 / module.MAX_SUBSETS**0.5)  # five standard errors


def test_sampled_subsets_are_subsets() -> None:
    drawn = subsets(40, 20, 3)

    assert (np.diff(drawn, axis=1) > 0).all()  # increasing, so no index occurs twice
    assert drawn.min() == 0
    assert drawn.max() == 39


@pytest.mark.parametrize(
    ("right", "questions", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)],
)
def test_wilson_gives_published_intervals(right: int, questions: int, low: float, high: float) -> None:
    """The last two are in Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I."""
    interval = wilson(right, questions, 0.95)

    assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert interval.low <= interval.value <= interval.high


def test_the_bootstrap_agrees_with_the_normal_interval_of_many_questions() -> None:
    values = np.random.default_rng(5).random(400)
    estimate = bootstrap(list(values), 0.9)
    half = 1.6449 * values.std() / 20

    assert estimate.value == pytest.approx(values.mean())
    # The quantiles of 2000 resampled means have a standard error of about 4 % of that half width.
    assert (estimate.low, estimate.high) == (
        pytest.approx(values.mean() - half, abs=0.2 * half),
        pytest.approx(values.mean() + half, abs=0.2 * half),
    )
    assert estimate == bootstrap(list(values), 0.9)


def test_a_mean_of_right_and_wrong_has_wilsons_interval_and_any_other_mean_the_bootstraps() -> None:
    assert mean_with_interval([1.0, 1.0, 1.0], 0.95) == wilson(3, 3, 0.95)
    # Resampling a single value gives an interval of width 0.
    assert mean_with_interval([0.25], 0.95) == wilson(0.25, 1, 0.95)
    assert mean_with_interval([0.25, 0.25], 0.95) == wilson(0.5, 2, 0.95)
    assert mean_with_interval([3.0], 0.95) == Estimate(3.0, 3.0, 3.0)
    assert mean_with_interval([0.5, 1.0, 0.0], 0.95) == bootstrap([0.5, 1.0, 0.0], 0.95)
    assert mean_with_interval([-1.0, 1.0, 1.0], 0.95) == bootstrap([-1.0, 1.0, 1.0], 0.95)


def test_a_paired_difference_by_hand() -> None:
    """Bonett & Price: 5 of 20 questions are won and 1 is lost, so the proportions are (5 + 1)/22 and (1 + 1)/22."""
    old = [0.0] * 5 + [1.0] + [1.0] * 10 + [0.0] * 4
    new = [1.0] * 5 + [0.0] + [1.0] * 10 + [0.0] * 4
    won, lost = 6 / 22, 2 / 22
    half = 1.959964 * math.sqrt((won + lost - (won - lost) ** 2) / 22)
    estimate = paired_difference(new, old, 0.95)

    assert estimate.value == pytest.approx(4 / 20)
    assert (estimate.low, estimate.high) == (
        pytest.approx(won - lost - half, rel=1e-6),
        pytest.approx(won - lost + half, rel=1e-6),
    )
    all_won = paired_difference([1.0] * 10, [0.0] * 10, 0.95)
    assert 0.5 < all_won.low < all_won.high <= all_won.value == 1
    assert paired_difference([3.0], [1.0], 0.95) == Estimate(2.0, -math.inf, math.inf)


def test_answers_that_have_not_changed_leave_a_width() -> None:
    """Bug: an interval of ± 0.0 points from ten questions."""
    estimate = paired_difference([1.0] * 10, [1.0] * 10, 0.95)
    assert estimate.value == 0
    assert 0.1 < estimate.high < 0.4


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_a_paired_interval_covers_as_promised(confidence: float) -> None:
    """Bug: the interval of unpaired shares, which is far wider if answers agree."""
    random = np.random.default_rng(0)
    covered, widths, trials = 0, [], 2_000
    for _ in range(trials):
        easy = random.random(60)
        old, new = (easy < 0.5).astype(float), (easy + 0.1 * random.standard_normal(60) < 0.6).astype(float)
        estimate = paired_difference(new.tolist(), old.tolist(), confidence)
        covered += estimate.low <= 0.1 <= estimate.high
        widths.append(estimate.high - estimate.low)
    assert covered / trials >= confidence - 0.03
    unpaired = 2 * 1.96 * math.sqrt(2 * 0.25 / 60)
    assert np.mean(widths) < unpaired * 0.75
