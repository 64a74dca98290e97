"""Sampling by the inverse CDF: frequencies of tokens, and raw and behaviour log-probabilities."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nemo_opd.rollout.engine_interface import Sampling
from nemo_opd.rollout.transformers_engine import InverseCDF, inverse_cdf, uniforms

VOCABULARY, COLUMNS = 37, 40
IDS = torch.zeros(1, 1, dtype=torch.int64)
SCANNED = 20_000
"""Evenly spaced numbers: a token gets its probability's share of them, plus or minus one."""


def logits(seed: int = 0) -> Tensor:
    """Return logits [1, COLUMNS]; columns beyond the vocabulary are the largest."""
    scores = 2 * torch.randn(1, COLUMNS, generator=torch.Generator().manual_seed(seed))
    scores[:, VOCABULARY:] = 50.0
    return scores


def shares(sampling: Sampling, scores: Tensor) -> Tensor:
    """Return the share of numbers from 0 to 1 that select each token: [COLUMNS]."""
    numbers = (torch.arange(SCANNED, dtype=torch.float64) + 0.5) / SCANNED
    processor = InverseCDF(sampling, numbers[:, None], VOCABULARY)
    tokens = processor(IDS, scores.expand(SCANNED, -1)).argmax(-1)
    return tokens.bincount(minlength=COLUMNS) / SCANNED


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.5), Sampling(2.0), Sampling(0.7, 0.6), Sampling(1.3, 1.0, 5), Sampling(0.9, 0.8, 9)],
    ids=str,
)
def test_tokens_are_as_frequent_as_with_transformers_warpers(sampling: Sampling) -> None:
    """Bug: top-k and top-p in another order than transformers'."""
    warped = logits()[:, :VOCABULARY]
    warped = TemperatureLogitsWarper(float(sampling.temperature))(IDS, warped)
    if sampling.top_k is not None:
        warped = TopKLogitsWarper(sampling.top_k)(IDS, warped)
    warped = TopPLogitsWarper(sampling.top_p)(IDS, warped)
    expected = torch.zeros(COLUMNS).index_put((torch.arange(VOCABULARY),), warped.softmax(-1)[0])

    actual = shares(sampling, logits())

    assert (actual - expected).abs().max() <= 1.01 / SCANNED
    assert not actual[expected == 0].any()


def test_zero_temperature_takes_the_likeliest_token() -> None:
    actual = shares(Sampling(0.0, 0.3, 2), logits())

    assert actual.argmax() == logits()[0, :VOCABULARY].argmax()
    assert actual.max() == 1


def test_log_probabilities_are_of_the_raw_distribution() -> None:
    numbers = torch.from_numpy(uniforms([5], 4))
    processor = InverseCDF(Sampling(0.4, 0.5, 3), numbers, VOCABULARY)

    tokens = [int(processor(IDS, logits(step)).argmax()) for step in range(4)]

    raw = [logits(step)[0, :VOCABULARY].double().log_softmax(-1)[token] for step, token in enumerate(tokens)]
    torch.testing.assert_close(processor.logprobs[0].double(), torch.stack(raw), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(0.5), Sampling(0.7, 0.6), Sampling(1.3, 1.0, 5), Sampling(0.0)], ids=str)
def test_behaviour_log_probabilities_equal_frequencies(sampling: Sampling) -> None:
    """Bugs: log-probabilities of the raw distribution, or before top-k and top-p."""
    numbers = (torch.arange(SCANNED, dtype=torch.float64) + 0.5) / SCANNED
    processor = InverseCDF(sampling, numbers[:, None], VOCABULARY)
    tokens = processor(IDS, logits().expand(SCANNED, -1)).argmax(-1)

    share = tokens.bincount(minlength=COLUMNS)[tokens].double() / SCANNED
    difference = processor.behaviour_logprobs[:, 0].double().exp() - share

    assert difference.abs().max() <= 1.01 / SCANNED


def test_without_warping_both_are_the_same_numbers() -> None:
    processor = InverseCDF(Sampling(), torch.from_numpy(uniforms(range(50), 1)), VOCABULARY)
    processor(IDS, logits().expand(50, -1))

    assert torch.equal(processor.behaviour_logprobs, processor.logprobs)


def test_no_number_takes_a_token_of_probability_zero() -> None:
    """Bug: a token without probability at either end of the range, as the sum is not 1 because of rounding."""
    probabilities = torch.tensor([[0.0, 0.3, 0.0, 0.7 - 1e-4, 0.0]])
    last = np.nextafter(1.0, 0.0)

    assert inverse_cdf(probabilities, torch.tensor([0.0], dtype=torch.float64)).item() == 1
    assert inverse_cdf(probabilities, torch.tensor([last], dtype=torch.float64)).item() == 3


def test_rare_tokens_of_a_large_vocabulary_are_found() -> None:
    """Bug: sums in 32 bits, which miss the middle of each of 2^17 equal probabilities."""
    size = 2**17
    probabilities = torch.full((1, size), 1 / size)
    expected = torch.arange(0, size, 997)

    tokens = [inverse_cdf(probabilities, (token.double()[None] + 0.5) / size).item() for token in expected[:20]]

    assert tokens == expected[:20].tolist()


def test_numbers_depend_on_the_seed_alone() -> None:
    """Bug: numbers that depend on the request's length or on other requests in the batch."""
    together = uniforms([1, 2, 2**63 - 1], 6)

    assert together.shape == (3, 6)
    np.testing.assert_array_equal(together[1:2, :3], uniforms([2], 3))
    assert len(np.unique(together)) == together.size
    assert ((together >= 0) & (together < 1)).all()


def test_numbers_are_evenly_distributed_over_seeds() -> None:
    """Bug: first numbers of consecutive seeds are correlated. The 99.9 % quantile of χ² for 19 degrees is 43.8."""
    counts = np.histogram(uniforms(range(4000), 1), 20, (0, 1))[0]

    assert ((counts - 200) ** 2 / 200).sum() < 43.8
