"""How a global batch is cut into the rows of each rank, when student and teachers are laid out differently."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import TypeVar

from nemo_opd.data.collate import pad_rows, shards
from nemo_opd.distributed.layout import Layout
from nemo_opd.logging.metrics import merge
from nemo_opd.types import Batch, Max, Metric, Metrics

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class BatchGrid:
    """The same padded rows for all groups; each cuts them into equal consecutive parts, one per data-parallel index."""

    student: Layout
    teachers: tuple[Layout, ...]
    micro_batch_size: int

    @property
    def unit(self) -> int:
        """Rows are a multiple of this: the ranks of a group have equally many, and equally many microbatches."""
        return lcm(self.student.dp * self.micro_batch_size, *(teacher.dp for teacher in self.teachers))

    def padded(self, batch: Batch) -> Batch:
        """With empty rows behind, which cost one position each."""
        return pad_rows(batch, -(-len(batch) // self.unit) * self.unit)

    def by_rank(self, batch: Batch, layout: Layout) -> list[Batch]:
        """The rows of each rank of a group; ranks that differ in cp or tp alone have the same."""
        parts = shards(self.padded(batch), layout.dp)
        return [parts[layout.coordinates(rank)[0]] for rank in range(layout.size)]


def shared_out(items: Sequence[Item], layout: Layout) -> list[list[Item]]:
    """By rank: equal consecutive parts, one per data-parallel index, disjoint and complete."""
    bounds = [len(items) * d // layout.dp for d in range(layout.dp + 1)]
    parts = [list(items[start:stop]) for start, stop in pairwise(bounds)]
    return [parts[layout.coordinates(rank)[0]] for rank in range(layout.size)]


def leads(layout: Layout) -> list[int]:
    """Of each data-parallel index the rank that speaks for its rows: all of its cp · tp ranks know the same sums."""
    return [layout.rank(d) for d in range(layout.dp)]


def reduced(by_rank: Sequence[Metrics], layout: Layout) -> dict[str, Metric]:
    """A group's metrics as one: each row counted once, and maxima over all ranks."""
    spoken = merge(by_rank[rank] for rank in leads(layout))
    return spoken | merge(maxima(by_rank))


def maxima(by_rank: Iterable[Metrics]) -> Iterable[Metrics]:
    for metrics in by_rank:
        yield {name: metric for name, metric in metrics.items() if isinstance(metric, Max)}
