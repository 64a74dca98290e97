"""Inverse-CDF sampling from uniform numbers that are drawn in advance."""

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
    """Draw one number in [0, 1) per token, [B, steps], from the sequences' seeds; fewer steps give a prefix."""
    return np.stack([np.random.Generator(np.random.Philox(seed)).random(steps) for seed in seeds])


def inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Sample tokens by inverse CDF: [B, V], [B] in [0, 1) → [B] int64.

    Tokens are ordered by id, so rounding only moves the boundaries between them. A token of probability 0 is never
    sampled, however sums are rounded.
    """
    # A 32-bit sum over a large vocabulary would lose rare tokens.
    cumulative = probabilities.double().cumsum(-1).masked_fill(probabilities == 0, 0)
    total = cumulative.amax(-1, keepdim=True)
    target = torch.minimum(uniform.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    # argmax returns the first maximum.
    return (cumulative > target).int().argmax(-1)


def _warpers_of(sampling: Sampling) -> LogitsProcessorList:
    """Return the active warpers, in the order temperature, top-k, top-p."""
    warpers = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


class InverseCDF(LogitsProcessor):
    """A logits processor that samples each step's tokens and gives them the only finite scores.

    It records the sampled tokens' log-probabilities under the raw and under the warped distribution.
    """

    def __init__(self, sampling: Sampling, uniform: Tensor, vocab_size: int) -> None:
        """uniform: float64 [B, steps]. vocab_size: columns that are tokens."""
        self._warpers: Any = _warpers_of(sampling)
        self._is_greedy = sampling.temperature == 0
        self._uniform, self._vocab_size = uniform, vocab_size
        self._logprobs: list[Tensor] = []
        self._behaviour_logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Sample tokens: [B, S], [B, V] fp32 → [B, V]."""
        raw = scores[:, : self._vocab_size].float()
        warped = self._warped(input_ids, raw)
        tokens = inverse_cdf(warped.softmax(-1), self._uniform[:, len(self._logprobs)]).unsqueeze(-1)
        self._logprobs.append(_log_probability(raw, tokens))
        self._behaviour_logprobs.append(_log_probability(warped, tokens))
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens, 0.0)

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities under the raw distribution, fp32 [B, steps so far]."""
        return torch.stack(self._logprobs, -1)

    @property
    def behaviour_logprobs(self) -> Tensor:
        """Log-probabilities under the warped distribution, fp32 [B, steps so far]."""
        return torch.stack(self._behaviour_logprobs, -1)

    def _warped(self, input_ids: Tensor, raw: Tensor) -> Tensor:
        """Return the scores to sample from; `raw` itself if sampling is not warped."""
        if self._is_greedy:
            return torch.full_like(raw, -torch.inf).scatter_(-1, raw.argmax(-1, keepdim=True), 0.0)
        warped: Tensor = self._warpers(input_ids, raw)
        return warped


def _log_probability(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities [B] of tokens [B, 1] under the softmax of scores [B, V]."""
    return (scores.gather(-1, tokens) - scores.logsumexp(-1, keepdim=True)).squeeze(-1)
