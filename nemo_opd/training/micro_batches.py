"""Sequences dealt over ranks, and those of a rank cut into microbatches, by their tokens (methods.md §8.5): pure."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from nemo_opd.rotary import RotaryLimit

_EQUAL_COST = 24_576
"""Tokens of a sequence whose attention costs as much as all else: 12 times a model's width, here of 2,048."""
_MOST_POSITIONS = 16
"""Positions of padded indices in a microbatch, as a multiple of its tokens."""


def dealt(rows: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    """Return an order of rows in which consecutive parts of `sizes` cost about the same.

    The dearest goes first to the part that has cost least; within each part the dearest come first. rows: tokens of the
    sequences of each.
    """
    costs = [sum(map(_cost, lengths)) for lengths in rows]
    parts: list[list[int]] = [[] for _ in sizes]
    least = [(0.0, part) for part, size in enumerate(sizes) if size]
    heapify(least)
    for index in sorted(range(len(rows)), key=lambda index: -costs[index]):
        spent, part = heappop(least)
        parts[part].append(index)
        if len(parts[part]) < sizes[part]:
            heappush(least, (spent + costs[index], part))
    return [index for part in parts for index in part]


def _cost(length: int) -> float:
    return length + length**2 / _EQUAL_COST


def micro_batches(
    by_rank: Sequence[Sequence[int]], budget: int, *, is_packed: bool, rotary: RotaryLimit | None = None
) -> list[list[slice]]:
    """Cut the sequences of each rank, of these lengths, into consecutive microbatches of no more tokens than `budget`.

    A longer sequence is alone, an empty one has length 0. is_packed: padding does not count. rotary: limit on one
    side of which all sequences of a microbatch are. All ranks have the same number of sequences and get the same number
    of microbatches.
    """
    found = [_cut(lengths, budget, is_packed, rotary) for lengths in by_rank]
    number = max(map(len, found))
    for cuts in found:
        while len(cuts) < number:
            _halve_largest(cuts)
    return found


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
    """Replace the cut of the most sequences by its halves."""
    place = max(range(len(cuts)), key=lambda place: cuts[place].stop - cuts[place].start)
    own = cuts[place]
    middle = (own.start + own.stop) // 2
    cuts[place : place + 1] = [slice(own.start, middle), slice(middle, own.stop)]
