"""Confidence intervals of a mean over questions.

The questions are the sample: which were asked is as random as what was answered, and answers to one question are not
independent. So the unit is the question, with one value each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

NUM_RESAMPLES = 2_000
SEED = 0
"""The same figures give the same interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and where it lies with the confidence asked for."""

    value: float
    low: float
    high: float


def mean_with_interval(values: Sequence[float], confidence: float) -> Estimate:
    """Wilson's score interval where every question is right or wrong, else the percentile bootstrap over questions.

    Wilson's keeps its promise for few questions and near 0 and 1, and has a width where all are right, which resampling
    has not. Values between, such as pass@k of n > k answers, vary less than a coin of the same mean, which the
    bootstrap sees and Wilson's does not. Where all are equal, as one question's is to itself, there is nothing to
    resample: from 0 to 1 Wilson's is given, at least as wide as it has to be; other rewards have no width then.
    """
    is_equal = len(set(values)) == 1 and 0 <= values[0] <= 1
    if set(values) <= {0.0, 1.0} or is_equal:
        return wilson(sum(values), len(values), confidence)
    return bootstrap(values, confidence)


def wilson(num_right: float, num_questions: int, confidence: float) -> Estimate:
    """Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference"."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = num_right / num_questions, z * z / num_questions
    centre = (share + weight / 2) / (1 + weight)
    half = (share * (1 - share) * weight + weight * weight / 4) ** 0.5 / (1 + weight)
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def bootstrap(values: Sequence[float], confidence: float) -> Estimate:
    """Source: Efron 1979, "Bootstrap methods: another look at the jackknife"; percentiles of resampled means."""
    known = np.array(values, np.float64)
    random = np.random.default_rng(SEED)
    means = [known[random.integers(len(known), size=len(known))].mean() for _ in range(NUM_RESAMPLES)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(known.mean()), float(low), float(high))
