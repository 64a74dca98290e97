"""Gradients that forward has formed and saved."""

from functools import cache

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import on_host, together


def backward(loss: Tensor) -> None:
    """Go backward from a scalar, by a 1 that is known on the host, so that `scaled` multiplies nothing."""
    loss.backward(_one(loss.device, loss.dtype))


def scaled(saved: Tensor, factor: Tensor) -> Tensor:
    """Compute saved · factor in backward: in place, and as a copy only if the graph is retained."""
    # Asked as PyTorch's own compiled functions ask before they give their buffers away.
    is_retained = torch._C._autograd._get_current_graph_task_keep_graph()
    if is_retained:
        return saved * factor
    return saved if _is_one(factor) else saved.mul_(factor)


@cache
def _one(device: torch.device, dtype: torch.dtype) -> Tensor:
    (one,) = together([torch.ones((), dtype=dtype)], device)
    return one


def _is_one(factor: Tensor) -> bool:
    """Return whether it is known at once to be 1: without waiting for a device."""
    known = on_host(factor)
    return known is not None and known.numel() == 1 and known.item() == 1
