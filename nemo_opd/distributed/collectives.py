"""Operations on tensors that are sharded over ranks: exchange of logits, full copies, and a search for NaN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class VocabularyShards:
    """A vocabulary split into consecutive columns, one shard per rank of `group`, in rank order.

    The exchanges are collective: every rank calls them equally often, with its own rows.
    """

    def __init__(self, group: dist.ProcessGroup, num_columns: int, device: torch.device) -> None:
        """Gather the shard sizes. num_columns: size of this rank's shard; sizes may differ. Collective."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.num_columns = self._all_gather(torch.tensor([num_columns], device=device)).flatten().tolist()

    def widths(self, width: int) -> list[int]:
        """Return how many of the vocabulary's first `width` columns each rank has."""
        begins = accumulate(self.num_columns, initial=0)
        return [max(0, min(columns, width - begin)) for begin, columns in zip(begins, self.num_columns, strict=False)]

    def gather_rows(self, rows: Tensor) -> tuple[Tensor, list[int]]:
        """Gather the row indices [R] of all ranks in rank order; return them and the number from each rank."""
        counts = self._all_gather(torch.tensor([len(rows)], device=rows.device)).flatten().tolist()
        padded = rows.new_zeros(max(counts))
        padded[: len(rows)] = rows
        gathered = self._all_gather(padded)
        return torch.cat([rank_rows[:count] for rank_rows, count in zip(gathered, counts, strict=True)]), counts

    def to_rows(self, columns: Tensor, counts: list[int], widths: list[int], out: Tensor) -> Tensor:
        """Exchange local columns of all ranks' rows [Σ counts, local width] for full local rows [R, Σ widths].

        out: receives the result and is returned; its rows may have any stride.
        """
        num_rows = counts[self.rank]
        received = self._exchange(
            columns.flatten(),
            [count * widths[self.rank] for count in counts],
            [num_rows * width for width in widths],
        )
        return torch.cat([part.view(num_rows, width) for part, width in zip(received, widths, strict=True)], 1, out=out)

    def to_columns(self, rows: Tensor, counts: list[int], widths: list[int]) -> Tensor:
        """Reverse `to_rows`: [R, Σ widths] → [Σ counts, local width]."""
        local_width = widths[self.rank]
        received = self._exchange(
            torch.cat([part.flatten() for part in rows.split(widths, 1)]),
            [len(rows) * width for width in widths],
            [count * local_width for count in counts],
        )
        return torch.cat([part.view(count, local_width) for part, count in zip(received, counts, strict=True)])

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """All-reduce over the group, in place."""
        dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def _all_gather(self, tensor: Tensor) -> Tensor:
        """Gather [...] from all ranks into [ranks, ...]."""
        gathered = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        dist.all_gather(gathered, tensor, group=self.group)
        return torch.stack(gathered)

    def _exchange(self, flat: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, ...]:
        result = flat.new_empty(sum(received))
        dist.all_to_all_single(result, flat, received, sent, group=self.group)
        return result.split(received)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, through which gradients flow, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered from all ranks (collective), or a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _num_copies(tensor: Tensor) -> int:
    """Return the number of ranks that hold the same shard: all ranks for a plain tensor."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(tensor, DTensor):
        return world
    mesh = tensor.device_mesh
    copies = world // mesh.size()
    for axis, placement in enumerate(tensor.placements):
        copies *= 1 if placement.is_shard() else mesh.size(axis)
    return copies


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
    count = (_count(local(first), dtype) / _num_copies(first)).to(device)
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
