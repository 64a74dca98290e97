"""Logits of a group of ranks: each rank has a shard of the columns, or all have the same logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.distributed.vocab_parallel import VocabularyShards
from nemo_opd.logits.aligned import empty_rows
from nemo_opd.logits.head import HeadLogits
from nemo_opd.logits.rows import Gradients, TensorLogits, TrainableRows


class VocabParallelLogits(TrainableRows):
    """Logits whose columns are sharded over the ranks of a group; a rank reads whole rows, for its share of the blocks.

    Each read and each gradient is an exchange between rows and column shards. Hidden states are the same on every rank
    and get the full gradient on each; a shard of logits or of a head gets the gradient of its columns.
    """

    def __init__(self, local: TensorLogits | HeadLogits, shards: VocabularyShards) -> None:
        """Wrap the local shard. local: this rank's columns."""
        self.local = local
        self.leaves = local.leaves
        self.device, self.dtype, self.is_product = local.device, local.dtype, local.is_product
        self.shards = shards
        self.shape = (*local.shape[:2], sum(self.shards.num_columns))
        self.share = (self.shards.rank, self.shards.num_ranks)
        self._announced: tuple[Tensor, list[int]] | None = None

    def begin(self, rows: Sequence[Tensor]) -> None:
        self._announced = (torch.cat(list(rows)), [len(rank_rows) for rank_rows in rows]) if rows else None

    def all_ranks_rows(self, rows: Tensor) -> tuple[Tensor, list[int]]:
        """Return the rows of all ranks in rank order, and their counts. Collective unless they were announced."""
        if self._announced is None:
            return self.shards.gather_rows(rows)
        assert self._announced[1][self.shards.rank] == len(rows)
        return self._announced

    def read(self, rows: Tensor, width: int) -> Tensor:
        widths = self.shards.widths(width)
        all_rows, counts = self.all_ranks_rows(rows)
        columns = self.local.read(all_rows, widths[self.shards.rank])
        return self.shards.to_rows(columns, counts, widths, empty_rows(len(rows), width, self.dtype, self.device))

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        return self.shards.reduce(tensor, op)

    def gradients(self) -> Gradients:
        return _VocabParallelGradients(self)


class _VocabParallelGradients(Gradients):
    def __init__(self, source: VocabParallelLogits) -> None:
        self._source, self._local = source, source.local.gradients()
        self.dtype, self.pulls_back = self._local.dtype, self._local.pulls_back

    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        shards = self._source.shards
        all_rows, counts = self._source.all_ranks_rows(rows)
        gradient = gradient.to(self.dtype)
        self._local.add(all_rows, shards.to_columns(gradient, counts, shards.widths(gradient.shape[1])), onto=onto)

    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        return self._local.pull_back(logits, gradient)

    def sums(self) -> tuple[Tensor | None, ...]:
        sums = self._local.sums()
        if isinstance(self._source.local, HeadLogits) and sums[0] is not None:
            self._source.reduce(sums[0])
        return sums


class ContextParallelLogits(TrainableRows):
    """Logits that every rank of a group has: each computes a share of the units, and gets that share's gradient."""

    def __init__(self, source: TrainableRows, group: dist.ProcessGroup) -> None:
        """Wrap logits of all positions. source: may have a share itself, over ranks with the same rank in `group`."""
        self.source, self.group = source, group
        self.leaves, self.shape = source.leaves, source.shape
        self.device, self.dtype, self.is_product = source.device, source.dtype, source.is_product
        index, processes = source.share
        self.share = (dist.get_rank(group) * processes + index, dist.get_world_size(group) * processes)

    def begin(self, rows: Sequence[Tensor]) -> None:
        _, processes = self.source.share
        first = dist.get_rank(self.group) * processes
        self.source.begin(rows[first : first + processes])

    def read(self, rows: Tensor, width: int) -> Tensor:
        return self.source.read(rows, width)

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        tensor = self.source.reduce(tensor, op)
        dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def gradients(self) -> Gradients:
        return self.source.gradients()
