"""A global batch cut into the rows of each rank, where student and teachers have different layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import TypeVar

import torch

from nemo_opd.data.collate import pad_rows, shards
from nemo_opd.distributed.layout import Layout
from nemo_opd.logging.metrics import merge
from nemo_opd.training.micro_batches import dealt
from nemo_opd.types import Batch, Max, Metric, Metrics

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class BatchGrid:
    """The same padded rows for all groups, cut into equal consecutive parts, one per data-parallel index."""

    student: Layout
    teachers: tuple[Layout, ...]

    @property
    def unit(self) -> int:
        """Divisor of the number of rows, so that the ranks of a group have equally many."""
        return lcm(self.student.dp, *(teacher.dp for teacher in self.teachers))

    def dealt(self, batch: Batch) -> Batch:
        """Return the batch in an order in which all ranks of a group have about the same work."""
        size = -(-len(batch) // self.unit)
        sizes = [max(0, min(size, len(batch) - part * size)) for part in range(self.unit)]
        order = torch.tensor(dealt(batch.student.packed_lengths, sizes))
        return batch.map(lambda tensor, _: tensor[order])

    def padded(self, batch: Batch) -> Batch:
        """Append empty rows, which cost one position each."""
        return pad_rows(batch, -(-len(batch) // self.unit) * self.unit)

    def by_rank(self, batch: Batch, layout: Layout) -> list[Batch]:
        """Return the rows of each rank of a group; ranks that differ only in cp or tp have the same."""
        parts = shards(self.padded(batch), layout.dp)
        return [parts[layout.coordinates(rank)[0]] for rank in range(layout.size)]


def shared_out(items: Sequence[_Item], layout: Layout) -> list[list[_Item]]:
    """Return equal consecutive parts by rank, one per data-parallel index, disjoint and complete."""
    bounds = [len(items) * d // layout.dp for d in range(layout.dp + 1)]
    parts = [list(items[start:stop]) for start, stop in pairwise(bounds)]
    return [parts[layout.coordinates(rank)[0]] for rank in range(layout.size)]


def leads(layout: Layout) -> list[int]:
    """Return the first rank of each data-parallel index, whose cp · tp ranks all have the same sums."""
    return [layout.rank(d) for d in range(layout.dp)]


def reduced(by_rank: Sequence[Metrics], layout: Layout) -> dict[str, Metric]:
    """Reduce a group's metrics: each row counts once, and maxima are over all ranks."""
    maxima = ({name: each for name, each in metrics.items() if isinstance(each, Max)} for metrics in by_rank)
    return merge(by_rank[rank] for rank in leads(layout)) | merge(maxima)
