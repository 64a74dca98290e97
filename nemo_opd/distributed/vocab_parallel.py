"""Exchange of logits between ranks: from shards of columns to whole rows, and back."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor


class VocabularyShards:
    """A vocabulary cut into consecutive columns, one shard per rank of `group`, in rank order.

    The exchanges are collective: every rank calls them equally often, each with its own rows.
    """

    def __init__(self, group: dist.ProcessGroup, num_columns: int, device: torch.device) -> None:
        """num_columns: size of this rank's shard; sizes may differ. Collective."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.num_columns = self._from_all(torch.tensor([num_columns], device=device)).flatten().tolist()

    def widths(self, width: int) -> list[int]:
        """Return how many of the vocabulary's leading `width` columns each rank has."""
        begins = accumulate(self.num_columns, initial=0)
        return [max(0, min(columns, width - begin)) for begin, columns in zip(begins, self.num_columns, strict=False)]

    def gather_rows(self, rows: Tensor) -> tuple[Tensor, list[int]]:
        """Gather the row indices [R] of every rank in rank order; return them and their counts."""
        counts = self._from_all(torch.tensor([len(rows)], device=rows.device)).flatten().tolist()
        padded = rows.new_zeros(max(counts))
        padded[: len(rows)] = rows
        every = self._from_all(padded)
        return torch.cat([of_rank[:count] for of_rank, count in zip(every, counts, strict=True)]), counts

    def to_rows(self, columns: Tensor, counts: list[int], widths: list[int], out: Tensor) -> Tensor:
        """Exchange own columns of all ranks' rows [Σ counts, own width] for all columns of own rows [R, Σ widths].

        out: rows for the result, at any distance from each other; it is returned.
        """
        own_rows = counts[self.rank]
        received = self._exchange(
            columns.flatten(),
            [count * widths[self.rank] for count in counts],
            [own_rows * width for width in widths],
        )
        return torch.cat([part.view(own_rows, width) for part, width in zip(received, widths, strict=True)], 1, out=out)

    def to_columns(self, rows: Tensor, counts: list[int], widths: list[int]) -> Tensor:
        """Reverse `to_rows`: [R, Σ widths] → [Σ counts, own width]."""
        own_width = widths[self.rank]
        received = self._exchange(
            torch.cat([part.flatten() for part in rows.split(widths, 1)]),
            [len(rows) * width for width in widths],
            [count * own_width for count in counts],
        )
        return torch.cat([part.view(count, own_width) for part, count in zip(received, counts, strict=True)])

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """All-reduce over the group, in place."""
        dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def _from_all(self, tensor: Tensor) -> Tensor:
        """Gather [...] from all ranks into [ranks, ...]."""
        every = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        dist.all_gather(every, tensor, group=self.group)
        return torch.stack(every)

    def _exchange(self, flat: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, ...]:
        result = flat.new_empty(sum(received))
        dist.all_to_all_single(result, flat, received, sent, group=self.group)
        return result.split(received)
