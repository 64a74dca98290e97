"""Gradients that were computed in forward and saved."""

from functools import cache

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import on_host, to_device_batched


def backward(loss: Tensor) -> None:
    """Run backward from a scalar with a 1 whose value the host knows, so that `scaled` need not multiply."""
    loss.backward(_one(loss.device, loss.dtype))


def scaled(saved: Tensor, factor: Tensor) -> Tensor:
    """Compute saved · factor in backward, in place unless the graph is retained."""
    # PyTorch's own compiled functions check the same before they donate buffers.
    is_retained = torch._C._autograd._get_current_graph_task_keep_graph()
    if is_retained:
        return saved * factor
    return saved if _is_one(factor) else saved.mul_(factor)


@cache
def _one(device: torch.device, dtype: torch.dtype) -> Tensor:
    (one,) = to_device_batched([torch.ones((), dtype=dtype)], device)
    return one


def _is_one(factor: Tensor) -> bool:
    """Return whether the host knows, without waiting for the device, that a factor is 1."""
    host_factor = on_host(factor)
    return host_factor is not None and host_factor.numel() == 1 and host_factor.item() == 1
