"""Weights of a prompt's rollouts relative to one another (methods.md §10.3).

Computed in float64 with exactly rounded sums, so that nothing depends on the order of rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError


def confidence_weights(mean_logprob: Tensor, prompt_ids: Tensor | Sequence[int], coefficient: float = 1.0) -> Tensor:
    """Compute softmax(coefficient · mean_logprob) within each prompt: [B] and [B] → [B], summing to 1 a prompt.

    mean_logprob: of the teacher, a token; −inf is a rollout without one, which weighs nothing unless all of the prompt
    are such. Of the type and device of mean_logprob. Raises ConfigError for other shapes, a NaN or +inf, or a
    coefficient that is not a number.
    """
    if not math.isfinite(coefficient):
        raise ConfigError(f"coefficient={coefficient}: log-probabilities are multiplied by it; give a number")

    def of_prompt(own: list[float]) -> list[float]:
        scored = [value for value in own if value != -math.inf]
        if not scored:
            return [1 / len(own)] * len(own)
        shares = iter(_softmax(scored, coefficient))
        return [0.0 if value == -math.inf else next(shares) for value in own]

    _check(mean_logprob, "mean_logprob", mean_logprob.isnan() | (mean_logprob == math.inf))
    return _within_prompts(of_prompt, mean_logprob, prompt_ids, "mean_logprob")


def reward_weights(reward: Tensor, prompt_ids: Tensor | Sequence[int], coefficient: float = 1.0) -> Tensor:
    """Compute n · softmax(reward / coefficient) within each prompt's n rollouts: [B] and [B] → [B], of mean 1 a prompt.

    Of the type and device of reward. Raises ConfigError for other shapes, a reward that is not finite, or a coefficient
    that is not above 0.
    """
    if not 0 < coefficient < math.inf:
        raise ConfigError(f"coefficient={coefficient}: rewards are divided by it; give a number above 0")

    def of_prompt(own: list[float]) -> list[float]:
        return [len(own) * share for share in _softmax(own, 1 / coefficient)]

    _check(reward, "reward", ~reward.isfinite())
    return _within_prompts(of_prompt, reward, prompt_ids, "reward")


def group_advantages(
    rewards: Tensor, prompt_ids: Tensor | Sequence[int], *, scale: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """Compute (reward − mean) / (standard deviation + epsilon) within each prompt's rollouts: [B] and [B] → [B].

    Of n − 1 degrees of freedom. Where all rewards of a prompt are equal it is exactly 0. scale=False: without the
    division. Of the type and device of rewards. Raises ConfigError for other shapes or a reward that is not finite.
    """
    _check(rewards, "rewards", ~rewards.isfinite())
    return _within_prompts(lambda own: _standardised(own, scale, epsilon), rewards, prompt_ids, "rewards")


def _within_prompts(
    of_prompt: Callable[[list[float]], list[float]],
    values: Tensor,
    prompt_ids: Tensor | Sequence[int],
    name: str,
) -> Tensor:
    """Apply a function to the values of each prompt: [B] → [B]."""
    prompts = prompt_ids.tolist() if isinstance(prompt_ids, Tensor) else list(prompt_ids)
    if values.dim() != 1 or len(prompts) != len(values):
        raise ConfigError(
            f"{name} has shape {list(values.shape)} for {len(prompts)} prompt_ids; give one number and one prompt a "
            "rollout"
        )
    given = values.tolist()
    rollouts: dict[int, list[int]] = {}
    for b, prompt in enumerate(prompts):
        rollouts.setdefault(prompt, []).append(b)
    found = torch.empty(len(given), dtype=torch.float64)
    for own in rollouts.values():
        found[own] = torch.tensor(of_prompt([given[b] for b in own]), dtype=torch.float64)
    return found.to(values.device, torch.promote_types(values.dtype, torch.float32))


def _check(values: Tensor, name: str, is_wrong: Tensor) -> None:
    if is_wrong.any():
        wrong = int(is_wrong.flatten().int().argmax())
        raise ConfigError(
            f"{name}[{wrong}]={float(values.flatten()[wrong])}: rollouts are compared by it; give a number for each"
        )


def _softmax(values: list[float], factor: float) -> list[float]:
    peak = max(factor * value for value in values)
    powers = [math.exp(factor * value - peak) for value in values]
    total = math.fsum(powers)
    return [power / total for power in powers]


def _standardised(values: list[float], scale: bool, epsilon: float) -> list[float]:
    """Standardise values: 0 where all are equal, since the division would enlarge the rounding of their mean."""
    if min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    if not scale:
        return [value - mean for value in values]
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return [(value - mean) / (deviation + epsilon) for value in values]
