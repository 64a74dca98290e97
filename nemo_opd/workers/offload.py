"""Moving models and optimizer state between device and host memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer


@contextmanager
def resident(model: nn.Module, device: str, *, offload: bool) -> Iterator[None]:
    """The model is on `device` inside and, if it is to be offloaded, on the host afterwards, also after an error."""
    if not offload:
        yield
        return
    try:
        move(model, device)
        yield
    finally:
        move(model, "cpu")


def move(model: nn.Module, device: str) -> None:
    model.to(device)
    release_cached_memory()


def move_optimizer(optimizer: Optimizer, device: str) -> None:
    """Move every tensor of the optimizer's state; step counters stay where they are, as AdamW wants them."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[name] = value.to(device)
    release_cached_memory()


def release_cached_memory() -> None:
    """Other processes share the device: what PyTorch keeps for itself they cannot have."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
