"""Moving models and optimizer state between device and host memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer


@contextmanager
def resident(
    model: nn.Module, device: str, *, offload: bool, gives_back: bool, optimizer: Optimizer | None = None
) -> Iterator[None]:
    """Inside, the model (and the optimizer's state) is on `device`; what is offloaded goes back to the host afterwards.

    gives_back: other processes take turns with this one on the device, and what PyTorch keeps for itself they could not
    have. All of it also after an error.
    """
    try:
        if offload:
            place(model, optimizer, device)
        yield
    finally:
        if offload:
            place(model, optimizer, "cpu")
        if offload or gives_back:
            release_cached_memory()


def place(model: nn.Module, optimizer: Optimizer | None, device: str) -> None:
    model.to(device)
    if optimizer is not None:
        move_optimizer(optimizer, device)


def move_optimizer(optimizer: Optimizer, device: str) -> None:
    """Move every tensor of the optimizer's state; step counters stay where they are, as AdamW wants them."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[name] = value.to(device)


def release_cached_memory() -> None:
    """Give back what PyTorch keeps of the device's memory for its next use."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
