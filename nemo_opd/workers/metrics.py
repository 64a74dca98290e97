"""Metrics of a step, read from the device."""

from dataclasses import fields

import torch
from torch import Tensor

from nemo_opd.types import Metric


def with_numbers(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Return the metrics with plain numbers instead of tensors, which the host waits for once."""
    values = {
        (name, field.name): getattr(metric, field.name) for name, metric in metrics.items() for field in fields(metric)
    }
    there = {place: value for place, value in values.items() if isinstance(value, Tensor)}
    if there:
        values |= zip(there, torch.stack([value.double() for value in there.values()]).tolist(), strict=True)
    return {
        name: type(metric)(**{field.name: float(values[name, field.name]) for field in fields(metric)})
        for name, metric in metrics.items()
    }
