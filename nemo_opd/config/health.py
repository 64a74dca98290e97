"""Alarms on the health of a run."""

from typing import Literal

from pydantic import Field

from nemo_opd.config.base import Settings


class Health(Settings):
    """Alarms on what the student samples. Each is compared with the first steps of the run."""

    action: Literal["warn", "stop"] = "warn"
    """stop: save a checkpoint and end the run."""
    patience: int = Field(5, ge=1)
    """Steps in a row that a sign must be seen."""
    max_length_growth: float = Field(4.0, gt=1)
    """Mean response length over that of the first steps."""
    max_truncation_rate: float = Field(0.9, gt=0, le=1)
    """Share of rollouts that do not end by themselves, where it was lower in the first steps."""
    min_entropy: float = Field(0.02, ge=0)
    """Nats per token, where it was higher in the first steps."""
    max_repetition: float = Field(0.5, gt=0, le=1)
    """Share of a response's 4-grams that occurred in it before."""
    max_mismatch: float = Field(0.1, gt=0)
    """Mean |log-probability by the engine − by the trainer| of sampled tokens, in nats.

    Rounding alone stays below half of the default: bf16 rounds a logit between 16 and 32 by up to 1/16, and two such
    roundings differ by 1/24 on average.
    """
