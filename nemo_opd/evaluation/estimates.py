"""Estimates over questions: pass@k, maj@k, means with confidence intervals, and their logged names.

The choice of questions is as random as the answers, and answers to one question are not independent. So the unit of an
interval is the question, with one value each.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from nemo_opd.logging.metrics import PREFIX

_NUM_RESAMPLES = 2_000
_SEED = 0
"""Seed of the bootstrap, so that equal values have equal intervals."""
MAX_SUBSETS = 2_000
"""Largest number of subsets of k answers for an exact maj@k; if there are more, this many are drawn at random.

The standard error is then at most 0.5 / √2000 = 0.011 for one question, and 0.011 / √Q for Q questions.
"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its confidence interval."""

    value: float
    low: float
    high: float


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """Return the chance that at least one of k answers is right: 1 − C(n − c, k) / C(n, k), unbiased for n ≥ k.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    assert 0 <= num_correct <= num_samples
    assert 1 <= k <= num_samples
    # as one fraction, pass@1 is exactly the mean of rewards of 0 and 1, which tables then leave out
    draws = math.comb(num_samples, k)
    return (draws - math.comb(num_samples - num_correct, k)) / draws


def maj_at_k(votes: Sequence[str | None], correct: Sequence[bool], k: int, *, seed: int = 0) -> float:
    """Return the chance that the majority of k answers is right.

    Equal votes are the same answer, which is right if its first occurrence is. None abstains; if all k abstain, the
    majority is wrong. In a tie the first answer wins. Exact for C(n, k) ≤ MAX_SUBSETS, otherwise a mean over subsets
    drawn with `seed`.
    """
    assert len(votes) == len(correct)
    answers = list(dict.fromkeys(vote for vote in votes if vote is not None))
    if not answers:
        return 0.0
    gives = np.array([[vote == answer for answer in answers] for vote in votes])
    is_right = np.array([correct[votes.index(answer)] for answer in answers])
    subset_votes = gives[subsets(len(votes), k, seed)]
    num_votes = subset_votes.sum(axis=1)
    first = np.where(num_votes > 0, subset_votes.argmax(axis=1), k)
    winner = (num_votes * (k + 1) - first).argmax(axis=1)
    has_winner = num_votes.any(axis=1)
    return float((is_right[winner] & has_winner).mean())


def subsets(n: int, k: int, seed: int) -> NDArray[np.int64]:
    """Return sorted subsets [M, k] of n answers: all of them, or a random MAX_SUBSETS if there are more."""
    if math.comb(n, k) <= MAX_SUBSETS:
        return np.array(list(combinations(range(n), k)))
    shuffled = np.random.default_rng(seed).random((MAX_SUBSETS, n)).argsort(axis=1)
    return np.sort(shuffled[:, :k], axis=1)


def mean_with_interval(values: Sequence[float], confidence: float) -> Estimate:
    """Return the mean with Wilson's score interval if all values are 0 or 1, else with a bootstrap over questions.

    Wilson's interval has its nominal coverage for few questions and near 0 and 1, and a width even if all answers are
    right, unlike resampling. Values between 0 and 1, such as pass@k of n > k answers, vary less than a coin with the
    same mean; the bootstrap takes that into account, Wilson's interval does not. If all values are equal, resampling
    gives no width: within [0, 1] Wilson's interval is returned, which is then too wide rather than too narrow; other
    values get no width.
    """
    is_equal = len(set(values)) == 1 and 0 <= values[0] <= 1
    if set(values) <= {0.0, 1.0} or is_equal:
        return wilson(sum(values), len(values), confidence)
    return bootstrap(values, confidence)


def wilson(num_right: float, num_questions: int, confidence: float) -> Estimate:
    """Return the share of right answers with Wilson's score interval.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = num_right / num_questions, z * z / num_questions
    centre = (share + weight / 2) / (1 + weight)
    half = (share * (1 - share) * weight + weight * weight / 4) ** 0.5 / (1 + weight)
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def bootstrap(values: Sequence[float], confidence: float) -> Estimate:
    """Return the mean with the percentile interval of resampled means.

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife".
    """
    sample = np.array(values, np.float64)
    random = np.random.default_rng(_SEED)
    means = [sample[random.integers(len(sample), size=len(sample))].mean() for _ in range(_NUM_RESAMPLES)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(sample.mean()), float(low), float(high))


def paired_difference(values: Sequence[float], others: Sequence[float], confidence: float) -> Estimate:
    """Return the mean of values − others, for the same questions in the same order, with its confidence interval.

    For values between 0 and 1 it is the adjusted Wald interval, which adds two questions, one won and one lost. It has
    a width even if no answer has changed, and its centre is nearer to 0 than the mean. For other values it is the
    normal interval of the mean difference, which is infinitely wide for one question.
    Source: Bonett & Price 2012, "Adjusted Wald confidence interval for a difference of binomial proportions based on
    paired data".
    """
    differences = np.array(values, np.float64) - np.array(others, np.float64)
    z, mean = NormalDist().inv_cdf((1 + confidence) / 2), float(differences.mean())
    if all(0 <= value <= 1 for value in (*values, *others)):
        adjusted = np.append(differences, [1.0, -1.0])
        centre, half = float(adjusted.mean()), float(z * adjusted.std() / len(adjusted) ** 0.5)
        return Estimate(mean, max(-1.0, centre - half), min(1.0, centre + half))
    spread = differences.std(ddof=1) if len(differences) > 1 else math.inf
    half = float(z * spread / len(differences) ** 0.5)
    return Estimate(mean, mean - half, mean + half)


def ratio_difference(
    totals: Sequence[float], baseline: Sequence[float], sizes: Sequence[int], confidence: float
) -> Estimate:
    """Return Σ totals / Σ sizes − Σ baseline / Σ sizes over the same texts, with a bootstrap over texts.

    With one text the interval is infinitely wide.
    """
    gains, weights = np.array(totals, np.float64) - np.array(baseline, np.float64), np.array(sizes, np.float64)
    value = float(gains.sum() / weights.sum())
    if len(gains) < 2:
        return Estimate(value, -math.inf, math.inf)
    random, resampled = np.random.default_rng(_SEED), []
    for _ in range(_NUM_RESAMPLES):
        texts = random.integers(len(gains), size=len(gains))
        resampled.append(gains[texts].sum() / max(1.0, weights[texts].sum()))
    low, high = np.quantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(value, float(low), float(high))


def with_bounds(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return each estimate's value and the bounds of its interval: pass@1, pass@1_low, pass@1_high, …"""
    figures: dict[str, float] = {}
    for name, estimate in estimates.items():
        figures |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return figures


def named(figures: Mapping[str, float], name: str) -> dict[str, float]:
    """Return a set's figures under their logged names, such as eval/<set>/pass@1; name: '' for the unnamed set."""
    prefix = f"{PREFIX}{name}/" if name else PREFIX
    return {f"{prefix}{figure}": value for figure, value in figures.items()}
