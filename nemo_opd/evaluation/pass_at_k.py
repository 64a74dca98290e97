"""What k of n sampled answers to one question are worth: expectations over every choice of k of them."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

MAX_SUBSETS = 2_000
"""Choices of k answers that maj@k looks at. Where there are more, it is a mean over so many drawn at random, whose
standard error is at most 0.5 / √2000 = 0.011 for one question, and that over √Q for Q questions.
"""


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """The chance that one of k answers is right: 1 − C(n − c, k) / C(n, k), which is unbiased for n ≥ k.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    assert 0 <= num_correct <= num_samples
    assert 1 <= k <= num_samples
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def maj_at_k(votes: Sequence[str | None], correct: Sequence[bool], k: int, *, seed: int = 0) -> float:
    """The chance that the answer most of k give is right.

    Equal votes are the same answer, right where the first that gives it is; None abstains, and where all of k abstain
    the answer is wrong. Of answers with equally many votes the one given first wins. Exact for C(n, k) ≤ MAX_SUBSETS,
    else a mean over subsets drawn from `seed`.
    """
    assert len(votes) == len(correct)
    answers = list(dict.fromkeys(vote for vote in votes if vote is not None))
    if not answers:
        return 0.0
    gives = np.array([[vote == answer for answer in answers] for vote in votes])
    is_right = np.array([correct[votes.index(answer)] for answer in answers])
    chosen = gives[subsets(len(votes), k, seed)]
    num_votes = chosen.sum(axis=1)
    first = np.where(num_votes > 0, chosen.argmax(axis=1), k)
    winner = (num_votes * (k + 1) - first).argmax(axis=1)
    has_winner = num_votes.any(axis=1)
    return float((is_right[winner] & has_winner).mean())


def subsets(n: int, k: int, seed: int) -> NDArray[np.int64]:
    """[M, k]: choices of k of n, each in increasing order; all of them where they are MAX_SUBSETS at most."""
    if math.comb(n, k) <= MAX_SUBSETS:
        return np.array(list(combinations(range(n), k)))
    shuffled = np.random.default_rng(seed).random((MAX_SUBSETS, n)).argsort(axis=1)
    return np.sort(shuffled[:, :k], axis=1)
