"""The clipped importance ratio of policy-gradient losses (methods.md §10.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.types import Mean, Metric

LARGEST_LOG_RATIO = 20.0
"""Ratios beyond it, a factor of 5e8, are cut and have no gradient: a loss of such numbers would mean nothing."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the ratio."""

    low: float
    """1 − low at least."""
    high: float
    """1 + high at most."""
    dual: float | None = None
    """Factor of a negative advantage at most; None: any."""

    def __post_init__(self) -> None:
        """Raise ConfigError for bounds out of range."""
        if not 0 <= self.low < 1:
            raise ConfigError(
                f"clip_low={self.low}: ratios are cut at 1 − clip_low; give a number of 0 or more and less than 1"
            )
        if not self.high >= 0:
            raise ConfigError(f"clip_high={self.high}: ratios are cut at 1 + clip_high; give 0 or more")
        if self.dual is not None and not self.dual > 1:
            raise ConfigError(
                f"dual_clip={self.dual}: it bounds ratios of tokens with a negative advantage; give a number above 1, "
                "or none"
            )

    def __call__(self, log_ratio: Tensor, advantage: Tensor) -> _Surrogate:
        """Compute −min(r A, clip(r) A) for r = exp(log_ratio), and −max(that minimum, dual · A) for A < 0: [u] and [u].

        The advantage is a constant.
        """
        ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
        advantage = advantage.detach()
        plain = ratio * advantage
        clipped = ratio.clamp(1 - self.low, 1 + self.high) * advantage
        gain = torch.minimum(plain, clipped)
        if self.dual is not None:
            gain = torch.where(advantage < 0, torch.maximum(gain, self.dual * advantage), gain)
        return _Surrogate(-gain, ratio.detach(), (gain != plain).detach())


@dataclass(frozen=True, slots=True)
class _Surrogate:
    """Policy-gradient loss of tokens."""

    loss: Tensor
    """[u]"""
    ratio: Tensor
    """[u], without a gradient."""
    is_clipped: Tensor
    """bool [u]: the ratio is so far off that the token has no gradient."""


def clip_metrics(ratio: Tensor, is_clipped: Tensor) -> dict[str, Metric]:
    """Return the share of clipped tokens and the mean ratio, from [U] and [U]."""
    return {
        "policy/clip_fraction": Mean(is_clipped.sum(), len(is_clipped)),
        "policy/ratio": Mean(ratio.sum(), len(ratio)),
    }
