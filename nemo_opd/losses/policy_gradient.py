"""Clipped policy gradient on sequence rewards, and weights of a prompt's rollouts (methods.md §10)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.logits.planned import Loss, PlannedLoss, Readings
from nemo_opd.logits.rows import LogitRows, trainable_rows
from nemo_opd.logits.term import Term, unit_cells
from nemo_opd.losses.arguments import check_positions, label_rows, next_tokens, own_columns
from nemo_opd.losses.cross_entropy import LIVE_COPIES, surprise
from nemo_opd.losses.importance import NUM_READINGS, Clip, Importance, clip_metrics
from nemo_opd.types import Mean, Metric


@Loss
def grpo(
    student_logits: Tensor | LogitRows,
    *,
    ids: Tensor,
    mask: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    behaviour_logprobs: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
    importance_level: str = "token",
    importance_cap: float | None = None,
    importance_veto: float | None = None,
    normalizer: float | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> PlannedLoss:
    """Compute −Σ min(r A, clip(r, 1 − clip_low, 1 + clip_high) A) over scored tokens / normalizer (methods.md §10.6).

    r = p(token) / exp(logprobs), at temperature 1; A is the advantage of the token's sequence, see `group_advantages`.
    dual_clip: for tokens with a negative A the loss is at most −dual_clip · A, whatever their ratio.
    behaviour_logprobs, importance_*: as for `sampled_kl`, by default `logprobs`, no cap and no veto (methods.md §11).

    Unshifted logits [B, S, V]; ids, logprobs and mask [B, S]: token i is scored by the logits at i−1; advantages [B].
    normalizer: scored tokens of the global batch, by default of this call, so that tokens count the same whatever the
    length of their sequence. vocab_size: leading columns of the head that belong to the tokenizer, by default all.
    Metrics: `policy/loss` (mean per token), `policy/clip_fraction`, `policy/ratio` and those of `Importance.metrics`.
    Raises ConfigError for shapes, sizes, names or bounds that do not fit.
    """
    student, clip = trainable_rows(student_logits), Clip(clip_low, clip_high, dual_clip)
    importance = Importance(importance_level, importance_cap, importance_veto)
    behaviour = logprobs if behaviour_logprobs is None else behaviour_logprobs
    check_positions(student.shape, ids=ids, mask=mask, logprobs=logprobs, behaviour_logprobs=behaviour)
    if tuple(advantages.shape) != (len(ids),):
        raise ConfigError(
            f"advantages has shape {list(advantages.shape)} for {len(ids)} sequences; give one each: [{len(ids)}]"
        )
    size = own_columns("vocab_size", vocab_size, student.shape[-1], student.shape[-1])
    rows = label_rows(mask)
    targets = next_tokens(ids, rows).long()
    token_proximal, token_behaviour = next_tokens(logprobs, rows), next_tokens(behaviour, rows)
    units = rows // ids.shape[1]
    token_advantages = advantages.index_select(0, units)
    sequences = importance.of_sequences(student, ids=ids, mask=mask, behaviour=behaviour, vocab_size=size)
    readings = Readings.of(student, len(rows), 2 + NUM_READINGS)

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        s = -surprise(logits, targets[part])
        proximal, behaviour = token_proximal[part].to(s.dtype), token_behaviour[part].to(s.dtype)
        weights = importance.applied(s.detach(), proximal, behaviour, sequences, units[part])
        surrogate = clip(s - proximal, token_advantages[part].to(s.dtype))
        ratio_readings = torch.stack([surrogate.ratio, surrogate.is_clipped.to(s.dtype)], 1)
        readings.put(part, torch.cat([ratio_readings, weights.readings()], 1))
        return weights.factor * surrogate.loss

    def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
        ratio_readings, weight_readings = readings.gather().tensor_split([2])
        loss: dict[str, Metric] = {"policy/loss": Mean(unweighted, len(rows))}
        return loss | clip_metrics(*ratio_readings) | importance.metrics(weight_readings, sequences)

    term = Term(rows, loss_of, unit_cells(len(rows), LIVE_COPIES * size), size, chunk_size=chunk_size)
    divisor = (len(rows) if normalizer is None else normalizer) or 1
    return PlannedLoss(student, [term], 1 / divisor, metrics_of)


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
