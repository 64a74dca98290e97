"""Exchange of logits between ranks: from column shards to full rows, and back."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor


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
