"""Relative weights of a prompt's rollouts (methods.md §10.3).

Computed in float64 with exactly rounded sums, so that results do not depend on the order of rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError


def confidence_weights(mean_logprob: Tensor, prompt_ids: Tensor | Sequence[int], coefficient: float = 1.0) -> Tensor:
    """Compute softmax(coefficient · mean_logprob) within each prompt: [B] and [B] → [B], sum 1 per prompt.

    mean_logprob: the teacher's mean log-probability per token; −inf marks a rollout without one, which gets weight 0
    unless all rollouts of the prompt are such. The result has the device of mean_logprob and its dtype, at least fp32.
    Raises ConfigError for other shapes, NaN or +inf, or a coefficient that is not finite.
    """
    if not math.isfinite(coefficient):
        raise ConfigError(f"coefficient={coefficient} cannot multiply log-probabilities; give a finite number")

    def weigh_prompt(logprobs: list[float]) -> list[float]:
        scored = [value for value in logprobs if value != -math.inf]
        if not scored:
            return [1 / len(logprobs)] * len(logprobs)
        shares = iter(_softmax(scored, coefficient))
        return [0.0 if value == -math.inf else next(shares) for value in logprobs]

    _check(mean_logprob, "mean_logprob", mean_logprob.isnan() | (mean_logprob == math.inf))
    return _within_prompts(weigh_prompt, mean_logprob, prompt_ids, "mean_logprob")


def reward_weights(reward: Tensor, prompt_ids: Tensor | Sequence[int], coefficient: float = 1.0) -> Tensor:
    """Compute n · softmax(reward / coefficient) within each prompt's n rollouts: [B] and [B] → [B], mean 1.

    The result has the device of reward and its dtype, at least fp32. Raises ConfigError for other shapes, a reward that
    is not finite, or a coefficient that is not above 0.
    """
    if not 0 < coefficient < math.inf:
        raise ConfigError(f"coefficient={coefficient} cannot divide rewards; give a finite number above 0")

    def weigh_prompt(rewards: list[float]) -> list[float]:
        return [len(rewards) * share for share in _softmax(rewards, 1 / coefficient)]

    _check(reward, "reward", ~reward.isfinite())
    return _within_prompts(weigh_prompt, reward, prompt_ids, "reward")


def group_advantages(
    rewards: Tensor, prompt_ids: Tensor | Sequence[int], *, scale: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """Compute (reward − mean) / (standard deviation + epsilon) within each prompt's rollouts: [B] and [B] → [B].

    The standard deviation has n − 1 degrees of freedom. Exactly 0 if all rewards of a prompt are equal. scale=False
    skips the division. The result has the device of rewards and their dtype, at least fp32. Raises ConfigError for
    other shapes or a reward that is not finite.
    """
    _check(rewards, "rewards", ~rewards.isfinite())
    return _within_prompts(lambda values: _standardised(values, scale, epsilon), rewards, prompt_ids, "rewards")


def _within_prompts(
    function: Callable[[list[float]], list[float]],
    values: Tensor,
    prompt_ids: Tensor | Sequence[int],
    name: str,
) -> Tensor:
    """Apply a function to the values of each prompt: [B] → [B]."""
    prompts = prompt_ids.tolist() if isinstance(prompt_ids, Tensor) else list(prompt_ids)
    if values.dim() != 1 or len(prompts) != len(values):
        raise ConfigError(
            f"{name} has shape {list(values.shape)} for {len(prompts)} prompt_ids; give one number and one prompt "
            "per rollout"
        )
    numbers = values.tolist()
    rollouts: dict[int, list[int]] = {}
    for b, prompt in enumerate(prompts):
        rollouts.setdefault(prompt, []).append(b)
    result = torch.empty(len(numbers), dtype=torch.float64)
    for indices in rollouts.values():
        result[indices] = torch.tensor(function([numbers[b] for b in indices]), dtype=torch.float64)
    return result.to(values.device, torch.promote_types(values.dtype, torch.float32))


def _check(values: Tensor, name: str, is_wrong: Tensor) -> None:
    if is_wrong.any():
        index = int(is_wrong.flatten().int().argmax())
        raise ConfigError(
            f"{name}[{index}]={float(values.flatten()[index])} cannot rank rollouts; give a number for each rollout"
        )


def _softmax(values: list[float], factor: float) -> list[float]:
    peak = max(factor * value for value in values)
    powers = [math.exp(factor * value - peak) for value in values]
    total = math.fsum(powers)
    return [power / total for power in powers]


def _standardised(values: list[float], scale: bool, epsilon: float) -> list[float]:
    """Standardise values. Equal values give 0, as the division would magnify the rounding of their mean."""
    if min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    if not scale:
        return [value - mean for value in values]
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return [(value - mean) / (deviation + epsilon) for value in values]
