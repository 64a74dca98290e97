"""Clipped importance ratio of policy-gradient losses (methods.md §10.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.types import Mean, Metric

LARGEST_LOG_RATIO = 20.0
"""Log-ratios beyond ±20 (a factor of 5e8) are clamped and get no gradient; such losses would be meaningless."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the importance ratio."""

    low: float
    """The ratio is clipped below at 1 − low."""
    high: float
    """The ratio is clipped above at 1 + high."""
    dual: float | None = None
    """Upper bound of the factor of a negative advantage, or None for no bound."""

    def __post_init__(self) -> None:
        """Raise ConfigError for bounds out of range."""
        if not 0 <= self.low < 1:
            raise ConfigError(
                f"clip_low={self.low}: ratios are clipped at 1 − clip_low; give a number from 0 to below 1"
            )
        if not self.high >= 0:
            raise ConfigError(f"clip_high={self.high}: ratios are clipped at 1 + clip_high; give 0 or more")
        if self.dual is not None and not self.dual > 1:
            raise ConfigError(
                f"dual_clip={self.dual}: it bounds ratios of tokens with a negative advantage; give a number above 1, "
                "or None"
            )

    def __call__(self, log_ratio: Tensor, advantage: Tensor) -> _Surrogate:
        """Compute −min(r A, clip(r) A) for r = exp(log_ratio), and −max(that minimum, dual · A) for A < 0: [u] and [u].

        The advantage gets no gradient.
        """
        ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
        advantage = advantage.detach()
        unclipped = ratio * advantage
        clipped = ratio.clamp(1 - self.low, 1 + self.high) * advantage
        gain = torch.minimum(unclipped, clipped)
        if self.dual is not None:
            gain = torch.where(advantage < 0, torch.maximum(gain, self.dual * advantage), gain)
        return _Surrogate(-gain, ratio.detach(), (gain != unclipped).detach())


@dataclass(frozen=True, slots=True)
class _Surrogate:
    """Policy-gradient loss of units."""

    loss: Tensor
    """[u]"""
    ratio: Tensor
    """[u], detached."""
    is_clipped: Tensor
    """bool [u]: clipping changed the loss, so that the unit has no gradient."""


def clip_metrics(ratio: Tensor, is_clipped: Tensor) -> dict[str, Metric]:
    """Return the clipped fraction and the mean ratio of units, from [U] and [U]."""
    return {
        "policy/clip_fraction": Mean(is_clipped.sum(), len(is_clipped)),
        "policy/ratio": Mean(ratio.sum(), len(ratio)),
    }
