"""This rank's shard of a tensor, and the whole of it."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, through which gradients flow; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """Return the tensor of all ranks, gathered where each has a shard, which communicates; a plain one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def num_copies(tensor: Tensor) -> int:
    """Return the number of ranks that have the same shard; of a plain tensor all ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(tensor, DTensor):
        return world
    mesh = tensor.device_mesh
    copies = world // mesh.size()
    for axis, placement in enumerate(tensor.placements):
        copies *= 1 if placement.is_shard() else mesh.size(axis)
    return copies
