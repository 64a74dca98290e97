"""Sampling that depends on nothing but numbers drawn ahead: the inverse of the cumulative distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nemo_opd.rollout.base import Sampling


def uniforms(seeds: Sequence[int], steps: int) -> NDArray[np.float64]:
    """[B, steps] in [0, 1): one a token of each sequence, by its seed alone. Fewer steps are the first of more."""
    return np.stack([np.random.Generator(np.random.Philox(seed)).random(steps) for seed in seeds])


def inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """[B, V], [B] in [0, 1) → [B] int64: the token in whose stretch of the cumulative distribution the number falls.

    In the order of ids, so that what differs by rounding moves a stretch's ends and no more. A token of probability 0
    is never taken, whatever rounds.
    """
    # In 32 bits a large vocabulary's sum would lose its rare tokens.
    cumulative = probabilities.double().cumsum(-1).masked_fill(probabilities == 0, 0)
    total = cumulative.amax(-1, keepdim=True)
    target = torch.minimum(uniform.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    # The first that is larger: argmax takes the first of equals.
    return (cumulative > target).int().argmax(-1)


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """Temperature, then top-k, then top-p; nothing for what is switched off."""
    chosen = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        chosen.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k is not None:
        chosen.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chosen.append(TopPLogitsWarper(sampling.top_p))
    return chosen


class InverseCDF(LogitsProcessor):
    """Chooses each step's tokens, so that the largest score of what it returns is that of the choice.

    Of what the model gave at a step it keeps the choice's log-probability alone: of the raw distribution, and of the
    warped one that the choice was drawn from.
    """

    def __init__(self, sampling: Sampling, uniform: Tensor, vocab_size: int) -> None:
        """uniform: float64 [B, steps]. Columns of `vocab_size` and beyond are no tokens."""
        self._warpers: Any = warpers(sampling)
        self._is_greedy = sampling.temperature == 0
        self._uniform, self._vocab_size = uniform, vocab_size
        self._logprobs: list[Tensor] = []
        self._behaviour_logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B, S], [B, V] fp32 → [B, V]."""
        raw = scores[:, : self._vocab_size].float()
        warped = self._warped(input_ids, raw)
        tokens = inverse_cdf(warped.softmax(-1), self._uniform[:, len(self._logprobs)]).unsqueeze(-1)
        self._logprobs.append(log_probability(raw, tokens))
        self._behaviour_logprobs.append(log_probability(warped, tokens))
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens, 0.0)

    @property
    def logprobs(self) -> Tensor:
        """fp32 [B, steps so far]."""
        return torch.stack(self._logprobs, -1)

    @property
    def behaviour_logprobs(self) -> Tensor:
        """fp32 [B, steps so far]."""
        return torch.stack(self._behaviour_logprobs, -1)

    def _warped(self, input_ids: Tensor, raw: Tensor) -> Tensor:
        """The scores to draw from; `raw` itself where nothing is warped."""
        if self._is_greedy:
            return torch.full_like(raw, -torch.inf).scatter_(-1, raw.argmax(-1, keepdim=True), 0.0)
        warped: Tensor = self._warpers(input_ids, raw)
        return warped


def log_probability(scores: Tensor, tokens: Tensor) -> Tensor:
    """Of tokens [B, 1] under the softmax of scores [B, V] → [B]."""
    return (scores.gather(-1, tokens) - scores.logsumexp(-1, keepdim=True)).squeeze(-1)
