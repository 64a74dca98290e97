"""Σ weight_i · KD_i over teachers."""

from collections.abc import Sequence

import torch

from nemo_opd.errors import ConfigError
from nemo_opd.types import LossOutput, Metric


def weighted_sum(outputs: Sequence[LossOutput], weights: Sequence[float]) -> LossOutput:
    """Σ weights[i] · outputs[i].loss, still this rank's share (METHODS §6).

    It has no metrics: teachers count their units differently, so no mean of this call merges with that of another
    into Σ weight_i · mean_i. Keep each teacher's own metrics, and form the sum from them with `weighted_value` after
    they are merged over microbatches and ranks. Raises ConfigError unless there is one weight per output.
    """
    _check(len(outputs), len(weights))
    loss = torch.stack([weight * output.loss for output, weight in zip(outputs, weights, strict=True)]).sum()
    return LossOutput(loss, {})


def weighted_value(metrics: Sequence[Metric], weights: Sequence[float]) -> float:
    """Σ weights[i] · the value of teacher i's metric, which must be merged over all microbatches and ranks already.

    With the units of the global batch as normalizers it equals the sum of `weighted_sum(...).loss` over all calls.
    Raises ConfigError unless there is one weight per metric.
    """
    _check(len(metrics), len(weights))
    return sum(weight * metric.value() for metric, weight in zip(metrics, weights, strict=True))


def _check(num_teachers: int, num_weights: int) -> None:
    if num_teachers != num_weights or not num_teachers:
        raise ConfigError(f"{num_weights} weights for {num_teachers} teachers; give one weight per teacher")
