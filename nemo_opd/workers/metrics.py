"""Metrics of a step, copied from the device."""

from dataclasses import fields

import torch
from torch import Tensor

from nemo_opd.types import Metric


def with_numbers(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Replace tensors in the metrics by numbers, with a single wait for the device."""
    values = {
        (name, field.name): getattr(metric, field.name) for name, metric in metrics.items() for field in fields(metric)
    }
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    if tensors:
        values |= zip(tensors, torch.stack([value.double() for value in tensors.values()]).tolist(), strict=True)
    return {
        name: type(metric)(**{field.name: float(values[name, field.name]) for field in fields(metric)})
        for name, metric in metrics.items()
    }
