"""Limits that indicate a failing on-policy run."""

from typing import Literal

from pydantic import Field

from nemo_opd.config.base import Settings


class Health(Settings):
    """Alarms about the student's samples, relative to the first steps of the run."""

    action: Literal["warn", "stop"] = "warn"
    """stop: save a checkpoint and end the run."""
    patience: int = Field(5, ge=1)
    """Consecutive steps that must cross a limit."""
    max_length_growth: float = Field(4.0, gt=1)
    """Largest mean response length relative to the first steps."""
    max_truncation_rate: float = Field(0.9, gt=0, le=1)
    """Largest share of truncated rollouts; no alarm if the first steps exceeded it too."""
    min_entropy: float = Field(0.02, ge=0)
    """Smallest entropy in nats per token; no alarm if the first steps were below it too."""
    max_repetition: float = Field(0.5, gt=0, le=1)
    """Largest share of a response's 4-grams that occurred earlier in it; no alarm if the first steps exceeded it too.
    """
    max_mismatch: float = Field(0.1, gt=0)
    """Largest mean |log-probability by the engine − by the trainer| of sampled tokens, in nats.

    Rounding alone stays below half of the default: bf16 rounds a logit between 16 and 32 by up to 1/16, and two such
    roundings differ by 1/24 on average.
    """
