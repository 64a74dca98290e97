"""Gradients that forward has formed and saved."""

import torch
from torch import Tensor


def scaled(saved: Tensor, factor: Tensor) -> Tensor:
    """saved · factor, for use in backward: where `saved` is, and as a copy only if the graph is retained."""
    # Asked as PyTorch's own compiled functions ask before they give their buffers away.
    is_retained = torch._C._autograd._get_current_graph_task_keep_graph()
    return saved * factor if is_retained else saved.mul_(factor)
