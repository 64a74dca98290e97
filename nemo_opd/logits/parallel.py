"""Logits that the ranks of a group have together: each some of the columns, or all of the same."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from nemo_opd.distributed.vocab_parallel import VocabularyShards
from nemo_opd.logits.head import HeadLogits
from nemo_opd.logits.rows import Gradients, TensorLogits, TrainableRows


class VocabParallelLogits(TrainableRows):
    """Logits whose columns lie on the ranks of a group: each reads whole rows, those of its share of the parts.

    Hidden states are the same on every rank and get the whole gradient on each; a shard of logits or of a head gets
    its own.
    """

    def __init__(self, local: TensorLogits | HeadLogits, group: dist.ProcessGroup) -> None:
        """Take this rank's columns. local: consecutive, in rank order; their number may differ. Collective."""
        self.local = local
        self.leaves = local.leaves
        self.device, self.dtype, self.is_product = local.device, local.dtype, local.is_product
        self.shards = VocabularyShards(group, local.shape[2], local.device)
        self.shape = (*local.shape[:2], sum(self.shards.num_columns))
        self.share = (self.shards.rank, self.shards.num_ranks)

    def read(self, rows: Tensor, width: int) -> Tensor:
        widths = self.shards.widths(width)
        every, counts = self.shards.gather_rows(rows)
        return self.shards.to_rows(self.local.read(every, widths[self.shards.rank]), counts, widths)

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
        every, counts = shards.gather_rows(rows)
        gradient = gradient.to(self.dtype)
        self._local.add(every, shards.to_columns(gradient, counts, shards.widths(gradient.shape[1])), onto=onto)

    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        return self._local.pull_back(logits, gradient)

    def sums(self) -> tuple[Tensor | None, ...]:
        sums = self._local.sums()
        if isinstance(self._source.local, HeadLogits) and sums[0] is not None:
            self._source.reduce(sums[0])
        return sums


class ContextParallelLogits(TrainableRows):
    """Logits that every rank of a group has: each computes a share of the units, and has its share of the gradient."""

    def __init__(self, every: TrainableRows, group: dist.ProcessGroup) -> None:
        """Take logits of all positions. every: may have its own share, among ranks with the same place in `group`."""
        self.every, self.group = every, group
        self.leaves, self.shape = every.leaves, every.shape
        self.device, self.dtype, self.is_product = every.device, every.dtype, every.is_product
        index, processes = every.share
        self.share = (dist.get_rank(group) * processes + index, dist.get_world_size(group) * processes)

    def read(self, rows: Tensor, width: int) -> Tensor:
        return self.every.read(rows, width)

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        tensor = self.every.reduce(tensor, op)
        dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def gradients(self) -> Gradients:
        return self.every.gradients()
