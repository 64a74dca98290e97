"""Moving models and optimizer state between device and host memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer


@contextmanager
def resident(model: nn.Module, device: str, *, offload: bool, optimizer: Optimizer | None = None) -> Iterator[None]:
    """Inside, the model (and the optimizer's state) is on `device`; what is offloaded goes back to the host afterwards.

    Also after an error.
    """
    if not offload:
        yield
        return
    try:
        place(model, optimizer, device)
        yield
    finally:
        place(model, optimizer, "cpu")


def place(model: nn.Module, optimizer: Optimizer | None, device: str) -> None:
    move(model, device)
    if optimizer is not None:
        move_optimizer(optimizer, device)


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
