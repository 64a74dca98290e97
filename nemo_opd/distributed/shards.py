"""Local shards and full copies of DTensors."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, through which gradients flow, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered from all ranks (collective), or a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def num_copies(tensor: Tensor) -> int:
    """Return the number of ranks that hold the same shard: all ranks for a plain tensor."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(tensor, DTensor):
        return world
    mesh = tensor.device_mesh
    copies = world // mesh.size()
    for axis, placement in enumerate(tensor.placements):
        copies *= 1 if placement.is_shard() else mesh.size(axis)
    return copies
