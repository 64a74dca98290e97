"""Split of a global batch into each rank's rows, for student and teachers with different layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import lcm
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_opd.data.collate import gather_rows, row_ids, shards
from nemo_opd.distributed.layout import Layout
from nemo_opd.logging.metrics import merge
from nemo_opd.rotary import RotaryLimit
from nemo_opd.types import Batch, Max, Metric, Metrics, Rows

_EQUAL_COST = 24_576
"""Length in tokens at which attention costs as much as all other work: 12 × hidden size, here of 2,048."""
_MOST_POSITIONS = 16
"""Limit on sequences × longest sequence in a packed microbatch, as a multiple of the token budget."""
_Item = TypeVar("_Item")
_Rows = TypeVar("_Rows", bound=Rows)


@dataclass(frozen=True, slots=True)
class BatchGrid:
    """A split of the same padded sequences for all groups into equal consecutive parts, one per data-parallel index."""

    student: Layout
    teachers: tuple[Layout, ...]

    @property
    def unit(self) -> int:
        """Smallest number of parts that divides equally among the data-parallel ranks of every group."""
        return lcm(self.student.dp, *(teacher.dp for teacher in self.teachers))

    def balanced(self, batch: Batch) -> Batch:
        """Reorder the batch so that all ranks of a group get about the same work; rows stay together."""
        counts = _row_of(batch).bincount().tolist()
        size = -(-len(counts) // self.unit)
        sizes = [max(0, min(size, len(counts) - part * size)) for part in range(self.unit)]
        lengths = [part.tolist() for part in batch.student.lengths.clamp(min=1).split(counts)]
        order = dealt(lengths, sizes)
        members = torch.arange(len(batch)).split(counts)
        reordered = gather_rows(batch, torch.cat([members[row] for row in order]))
        if batch.row is None:
            return reordered
        return replace(reordered, row=row_ids([counts[row] for row in order]))

    def padded(self, batch: Batch) -> Batch:
        """Add empty sequences of one position each, so that all ranks of a group get the same number."""
        return gather_rows(batch, self._places(batch))

    def is_given(self, batch: Batch) -> Tensor:
        """Return a mask of the padded batch that is false for padding sequences: bool [padded B]."""
        return self._places(batch) >= 0

    def unpad(self, rows: _Rows, batch: Batch) -> _Rows:
        """Drop padding rows and restore the batch's width."""
        is_given, width = self.is_given(batch), batch.student.ids.shape[1]
        return rows.map(lambda tensor, fill: F.pad(tensor[is_given], (0, width - tensor.shape[1]), value=fill))

    def joined(self, parts: Sequence[Tensor], batch: Batch, width: int, *, fill: float) -> Tensor:
        """Join tensors [sequences, ≤ width] of the padded batch's consecutive parts: [B, width], filled with `fill`."""
        padded = torch.cat([F.pad(part, (0, width - part.shape[1]), value=fill) for part in parts])
        return padded[self.is_given(batch)]

    def _places(self, batch: Batch) -> Tensor:
        """Return the index in the batch of each sequence in the padded batch, −1 for padding: int64 [padded B]."""
        row = _row_of(batch)
        part = row // -(-int(row[-1] + 1) // self.unit)
        counts = part.bincount(minlength=self.unit).tolist()
        parts = torch.arange(len(batch)).split(counts)
        return pad_sequence(list(parts), batch_first=True, padding_value=-1).flatten()

    def by_rank(self, batch: Batch, layout: Layout) -> list[Batch]:
        """Return each rank's sequences; ranks that differ only in cp or tp get the same ones."""
        parts = shards(self.padded(batch), layout.dp)
        return [parts[layout.coordinates(rank)[0]] for rank in range(layout.size)]


def _row_of(batch: Batch) -> Tensor:
    """Return the row of each sequence: int64 [B]."""
    return torch.arange(len(batch)) if batch.row is None else batch.row


def dealt(rows: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    """Return an order of rows whose consecutive parts, of `sizes` rows, cost about the same.

    Greedy: the most expensive row left goes to the cheapest part with room. A part's most expensive rows come first.
    rows: lengths in tokens of the sequences of each row.
    """
    costs = [sum(length + length**2 / _EQUAL_COST for length in lengths) for lengths in rows]
    parts: list[list[int]] = [[] for _ in sizes]
    cheapest = [(0.0, part) for part, size in enumerate(sizes) if size]
    heapify(cheapest)
    for index in sorted(range(len(rows)), key=lambda index: -costs[index]):
        cost, part = heappop(cheapest)
        parts[part].append(index)
        if len(parts[part]) < sizes[part]:
            heappush(cheapest, (cost + costs[index], part))
    return [index for part in parts for index in part]


def micro_batches(
    by_rank: Sequence[Sequence[int]], budget: int, *, is_packed: bool, rotary: RotaryLimit | None = None
) -> list[list[slice]]:
    """Cut each rank's sequences into consecutive microbatches of at most `budget` tokens, equally many on all ranks.

    by_rank: lengths of equally many sequences per rank; 0 for an empty one. A sequence longer than the budget is a
    microbatch by itself. is_packed: padding does not count. rotary: a microbatch does not mix sequences below and
    beyond this limit.
    """
    cuts_by_rank = [_cut(lengths, budget, is_packed, rotary) for lengths in by_rank]
    number = max(map(len, cuts_by_rank))
    for cuts in cuts_by_rank:
        while len(cuts) < number:
            _halve_largest(cuts)
    return cuts_by_rank


def _cut(lengths: Sequence[int], budget: int, is_packed: bool, rotary: RotaryLimit | None) -> list[slice]:
    cuts, start, tokens, longest = [], 0, 0, 0
    for end, length in enumerate(lengths):
        tokens, longest = tokens + length, max(longest, length)
        positions = (end + 1 - start) * longest
        is_over = (tokens if is_packed else positions) > budget or positions > _MOST_POSITIONS * budget
        crosses = rotary is not None and rotary.is_beyond(length) != rotary.is_beyond(lengths[end - 1])
        if end > start and (is_over or crosses):
            cuts.append(slice(start, end))
            start, tokens, longest = end, length, length
    return [*cuts, slice(start, len(lengths))]


def _halve_largest(cuts: list[slice]) -> None:
    """Split the microbatch with the most sequences into halves."""
    index = max(range(len(cuts)), key=lambda index: cuts[index].stop - cuts[index].start)
    start, stop = cuts[index].start, cuts[index].stop
    middle = (start + stop) // 2
    cuts[index : index + 1] = [slice(start, middle), slice(middle, stop)]


def shared_out(items: Sequence[_Item], layout: Layout) -> list[list[_Item]]:
    """Split items into consecutive parts of about equal size per data-parallel index; return each rank's part."""
    bounds = [len(items) * d // layout.dp for d in range(layout.dp + 1)]
    parts = [list(items[start:stop]) for start, stop in pairwise(bounds)]
    return [parts[layout.coordinates(rank)[0]] for rank in range(layout.size)]


def dp_leader_ranks(layout: Layout) -> list[int]:
    """Return the first rank of each data-parallel index, since its cp · tp ranks all have the same sums."""
    return [layout.rank(d) for d in range(layout.dp)]


def reduced(by_rank: Sequence[Metrics], layout: Layout) -> dict[str, Metric]:
    """Reduce a group's metrics: each row counts once, and maxima are over all ranks."""
    maxima = ({name: metric for name, metric in metrics.items() if isinstance(metric, Max)} for metrics in by_rank)
    return merge(by_rank[rank] for rank in dp_leader_ranks(layout)) | merge(maxima)
