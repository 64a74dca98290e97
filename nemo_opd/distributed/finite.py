"""Search for NaN and infinity in tensors, with the same result on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.distributed.shards import local, num_copies


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Report of the first tensor with non-finite values."""

    name: str
    count: int
    """Number of values that are NaN or infinite."""
    size: int
    """Total number of values."""
    others: int
    """Number of other tensors with non-finite values."""

    def __str__(self) -> str:
        plural = "s" if self.others > 1 else ""
        more = f" (and so has {self.others:,} other tensor{plural})" if self.others else ""
        return f"{self.name} has {self.count:,} of {self.size:,} values that are not finite{more}"


@torch.no_grad()
def find_not_finite(
    tensors: Mapping[str, Tensor], *, device: str | torch.device, dtype: torch.dtype | None = None
) -> NotFinite | None:
    """Return the first floating-point tensor with a NaN or infinite value, or None if all values are finite.

    Reads each shard once, without copies. device: device for the collectives. dtype: values are rounded to it first.
    Collective: every rank passes the same names in the same order, with its own shards. Communicates one all-reduce
    over all ranks, and a second one if a value is not finite.
    """
    is_wrong = _flags(tensors, dtype).to(device)
    dist.all_reduce(is_wrong)
    if not (wrong := _names(tensors, is_wrong)):
        return None
    first = tensors[wrong[0]]
    count = (_count(local(first), dtype) / num_copies(first)).to(device)
    dist.all_reduce(count)
    return NotFinite(wrong[0], round(float(count)), first.numel(), len(wrong) - 1)


@torch.no_grad()
def find_not_finite_here(tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> NotFinite | None:
    """Check unsharded tensors as `find_not_finite` does, without communication."""
    if not (wrong := _names(tensors, _flags(tensors, dtype))):
        return None
    first = tensors[wrong[0]]
    return NotFinite(wrong[0], int(_count(first, dtype)), first.numel(), len(wrong) - 1)


def _flags(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensor:
    """Return fp32 [tensors], 1 for a tensor with a non-finite value on this rank."""
    flags = [_is_wrong(local(value), dtype) for value in tensors.values()]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).float()


def _is_wrong(shard: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Test the extremes, which are NaN if any value is; rounding keeps their order."""
    if not shard.is_floating_point() or not shard.numel():
        return torch.zeros((), dtype=torch.bool, device=shard.device)
    if shard.itemsize == 1:  # aminmax does not support float8
        shard = shard.half()
    return ~torch.stack(torch.aminmax(shard)).to(dtype or shard.dtype).isfinite().all()


def _names(tensors: Mapping[str, Tensor], is_wrong: Tensor) -> list[str]:
    """Return the names of the flagged tensors; waits for the device."""
    return [name for name, wrong in zip(tensors, is_wrong.tolist(), strict=True) if wrong]


def _count(shard: Tensor, dtype: torch.dtype | None) -> Tensor:
    return (~shard.to(dtype or shard.dtype).isfinite()).sum().double()
