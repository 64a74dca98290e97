"""Weights and advantages within the rollouts of a prompt, against plain arithmetic."""

import math

import pytest
import torch

from nemo_opd.errors import ConfigError
from nemo_opd.losses import confidence_weights, group_advantages, reward_weights

PROMPTS = [7, 3, 7, 7, 3, 5]
VALUES = torch.tensor([-1.0, -0.5, -2.0, -0.1, -0.5, -3.0], dtype=torch.float64)
WEIGHTINGS = {
    "confidence": lambda values, prompts: confidence_weights(values, prompts, 1.3),
    "reward": lambda values, prompts: reward_weights(values, prompts, 0.7),
    "advantage": lambda values, prompts: group_advantages(values, prompts),
}


def test_confidence_is_a_softmax_within_a_prompt():
    """Bug: a softmax over the batch."""
    weights = confidence_weights(VALUES, torch.tensor(PROMPTS), 1.3).tolist()
    powers = [math.exp(1.3 * value) for value in (-1.0, -2.0, -0.1)]
    assert [weights[b] for b in (0, 2, 3)] == pytest.approx([power / sum(powers) for power in powers], rel=1e-14)
    assert [weights[b] for b in (1, 4, 5)] == [0.5, 0.5, 1.0]
    assert confidence_weights(VALUES, PROMPTS, 0.0).tolist() == pytest.approx([1 / 3, 0.5, 1 / 3, 1 / 3, 0.5, 1.0])


def test_rewards_have_a_mean_of_one_a_prompt():
    """Bug: weights that sum to 1, so prompts with many rollouts count less."""
    weights = reward_weights(VALUES, PROMPTS, 0.7).tolist()
    powers = [math.exp(value / 0.7) for value in (-1.0, -2.0, -0.1)]
    assert [weights[b] for b in (0, 2, 3)] == pytest.approx([3 * power / sum(powers) for power in powers], rel=1e-14)
    assert [weights[b] for b in (1, 4, 5)] == [1.0, 1.0, 1.0]


def test_advantages_are_standardised_within_a_prompt():
    """Bug: the mean or deviation of the batch, or a deviation divided by n."""
    advantages = group_advantages(VALUES, PROMPTS, epsilon=0.1).tolist()
    rewards = [-1.0, -2.0, -0.1]
    mean = sum(rewards) / 3
    deviation = math.sqrt(sum((value - mean) ** 2 for value in rewards) / 2)
    assert [advantages[b] for b in (0, 2, 3)] == pytest.approx(
        [(x - mean) / (deviation + 0.1) for x in rewards], rel=1e-13
    )
    plain = group_advantages(VALUES, PROMPTS, scale=False).tolist()
    assert [plain[b] for b in (0, 2, 3)] == pytest.approx([x - mean for x in rewards], rel=1e-13)


def test_equal_rewards_have_no_advantage():
    """Bug: a rounding of the mean divided by epsilon; 0.1 · 3 / 3 is not 0.1."""
    assert group_advantages(torch.full((3,), 0.1), [1, 1, 1], epsilon=0.0).tolist() == [0.0] * 3


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_order_does_not_matter(name):
    """To the bit. Bug: ranks that order rollouts differently compute different weights."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(60, generator=generator, dtype=torch.float64)
    prompts = torch.randint(0, 7, (60,), generator=generator)
    order = torch.randperm(60, generator=generator)
    assert torch.equal(WEIGHTINGS[name](values[order], prompts[order]), WEIGHTINGS[name](values, prompts)[order])


def test_no_overflow_and_rollouts_without_a_token():
    """Bug: exp of a large number, or −inf − −inf, is NaN."""
    assert confidence_weights(torch.tensor([-1e30, 0.0]), [0, 0], 1e9).tolist() == [0.0, 1.0]
    infinite = torch.tensor([-math.inf, -2.0, -math.inf, -math.inf])
    assert confidence_weights(infinite, [0, 0, 1, 1]).tolist() == [0.0, 1.0, 0.5, 0.5]
    assert reward_weights(torch.tensor([0.0, 1000.0]), [0, 0], 1e-3).tolist() == [0.0, 2.0]


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_values_that_are_not_finite_are_named(name):
    for wrong in (math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"\[1\]=(nan|inf)"):
            WEIGHTINGS[name](torch.tensor([0.0, wrong]), [0, 0])
    with pytest.raises(ConfigError, match="2 prompt_ids"):
        WEIGHTINGS[name](torch.zeros(3), [0, 0])


def test_invalid_coefficients_are_named():
    with pytest.raises(ConfigError, match="coefficient=0"):
        reward_weights(VALUES, PROMPTS, 0)
    with pytest.raises(ConfigError, match="coefficient=nan"):
        confidence_weights(VALUES, PROMPTS, math.nan)
