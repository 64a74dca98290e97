"""Models that leave the device between phases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from nemo_opd.models.parallelize import sharded_units


@contextmanager
def resident(
    model: nn.Module, device: str, *, offload: bool, gives_back: bool, optimizer: Optimizer | None = None
) -> Iterator[None]:
    """Have the model (and the optimizer's state) on `device` inside, and back on the host afterwards with `offload`.

    gives_back: other processes take turns with this one on the device, so memory that PyTorch caches is released.
    """
    try:
        if offload:
            place(model, optimizer, device)
        yield
    finally:
        if offload:
            place(model, optimizer, "cpu")
        if offload or gives_back:
            torch.cuda.empty_cache()


def place(model: nn.Module, optimizer: Optimizer | None, device: str) -> None:
    """Move the model and the optimizer's state, except AdamW's step counters, which stay where they are."""
    for unit in sharded_units(model):
        unit.reshard()  # a gathered copy would stay
    model.to(device)
    for state in {} if optimizer is None else optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[name] = value.to(device)
