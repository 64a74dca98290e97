"""Tokens are those that the distribution asks for, and log-probabilities those of the raw one."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nemo_opd.rollout.requests import Sampling
from nemo_opd.rollout.transformers_engine import InverseCDF, inverse_cdf, uniforms

VOCABULARY, COLUMNS = 37, 40
IDS = torch.zeros(1, 1, dtype=torch.int64)
SCANNED = 20_000
"""Numbers at even distances: a token gets its probability's share of them, but for one at either end."""


def logits(seed: int = 0) -> Tensor:
    """[1, COLUMNS]; those beyond the vocabulary are the largest."""
    scores = 2 * torch.randn(1, COLUMNS, generator=torch.Generator().manual_seed(seed))
    scores[:, VOCABULARY:] = 50.0
    return scores


def shares(sampling: Sampling, scores: Tensor) -> Tensor:
    """[COLUMNS]: how often each token is taken as the number runs from 0 to 1."""
    numbers = (torch.arange(SCANNED, dtype=torch.float64) + 0.5) / SCANNED
    processor = InverseCDF(sampling, numbers[:, None], VOCABULARY)
    tokens = processor(IDS, scores.expand(SCANNED, -1)).argmax(-1)
    return tokens.bincount(minlength=COLUMNS) / SCANNED


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.5), Sampling(2.0), Sampling(0.7, 0.6), Sampling(1.3, 1.0, 5), Sampling(0.9, 0.8, 9)],
    ids=str,
)
def test_tokens_are_taken_as_often_as_transformers_own_warpers_say(sampling: Sampling) -> None:
    """In transformers' order; both cuts at once are not the same in another."""
    warped = logits()[:, :VOCABULARY]
    warped = TemperatureLogitsWarper(float(sampling.temperature))(IDS, warped)
    if sampling.top_k is not None:
        warped = TopKLogitsWarper(sampling.top_k)(IDS, warped)
    warped = TopPLogitsWarper(sampling.top_p)(IDS, warped)
    wanted = torch.zeros(COLUMNS).index_put((torch.arange(VOCABULARY),), warped.softmax(-1)[0])

    found = shares(sampling, logits())

    assert (found - wanted).abs().max() <= 1.01 / SCANNED
    assert not found[wanted == 0].any()


def test_zero_temperature_takes_the_likeliest_token() -> None:
    found = shares(Sampling(0.0, 0.3, 2), logits())

    assert found.argmax() == logits()[0, :VOCABULARY].argmax()
    assert found.max() == 1


def test_log_probabilities_are_of_the_raw_distribution() -> None:
    numbers = torch.from_numpy(uniforms([5], 4))
    processor = InverseCDF(Sampling(0.4, 0.5, 3), numbers, VOCABULARY)

    tokens = [int(processor(IDS, logits(step)).argmax()) for step in range(4)]

    raw = [logits(step)[0, :VOCABULARY].double().log_softmax(-1)[token] for step, token in enumerate(tokens)]
    torch.testing.assert_close(processor.logprobs[0].double(), torch.stack(raw), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(0.5), Sampling(0.7, 0.6), Sampling(1.3, 1.0, 5), Sampling(0.0)], ids=str)
def test_log_probabilities_of_the_behaviour_are_how_often_tokens_are_taken(sampling: Sampling) -> None:
    """Bugs: those of the raw distribution, or before it is cut."""
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
    """At both ends of the range, and where the sum of probabilities is not 1 by rounding."""
    probabilities = torch.tensor([[0.0, 0.3, 0.0, 0.7 - 1e-4, 0.0]])
    last = np.nextafter(1.0, 0.0)

    assert inverse_cdf(probabilities, torch.tensor([0.0], dtype=torch.float64)).item() == 1
    assert inverse_cdf(probabilities, torch.tensor([last], dtype=torch.float64)).item() == 3


def test_rare_tokens_of_a_large_vocabulary_are_found() -> None:
    """Each of 2^17 equal stretches is hit by the number in its middle, which sums in 32 bits would miss."""
    size = 2**17
    probabilities = torch.full((1, size), 1 / size)
    wanted = torch.arange(0, size, 997)

    found = [inverse_cdf(probabilities, (token.double()[None] + 0.5) / size).item() for token in wanted[:20]]

    assert found == wanted[:20].tolist()


def test_numbers_depend_on_the_seed_alone() -> None:
    """Not on how many are drawn, nor on what else is: a longer request starts as a shorter one."""
    together = uniforms([1, 2, 2**63 - 1], 6)

    assert together.shape == (3, 6)
    np.testing.assert_array_equal(together[1:2, :3], uniforms([2], 3))
    assert len(np.unique(together)) == together.size
    assert ((together >= 0) & (together < 1)).all()


def test_numbers_are_evenly_distributed_over_seeds() -> None:
    """Seeds that follow one another, as they may, have first numbers with nothing in common: χ² over 20 cells.

    Its 99.9 % quantile for 19 degrees of freedom is 43.8.
    """
    counts = np.histogram(uniforms(range(4000), 1), 20, (0, 1))[0]

    assert ((counts - 200) ** 2 / 200).sum() < 43.8
