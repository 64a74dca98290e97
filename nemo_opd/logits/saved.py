"""Gradients that forward has formed and saved."""

import torch
from torch import Tensor


def scaled(saved: Tensor, factor: Tensor) -> Tensor:
    """Compute saved · factor in backward: in place, and as a copy only if the graph is retained."""
    # Asked as PyTorch's own compiled functions ask before they give their buffers away.
    is_retained = torch._C._autograd._get_current_graph_task_keep_graph()
    if is_retained:
        return saved * factor
    return saved if _is_one(factor) else saved.mul_(factor)


def _is_one(factor: Tensor) -> bool:
    """Known at once; elsewhere than on a CPU it would wait for the device."""
    return factor.device.type == "cpu" and factor.numel() == 1 and factor.item() == 1
