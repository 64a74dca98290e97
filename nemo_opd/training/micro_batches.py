"""Balancing of sequences over ranks, and microbatches with a token budget (methods.md §8.5). Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from nemo_opd.rotary import RotaryLimit

_EQUAL_COST = 24_576
"""Length in tokens at which attention costs as much as all other work: 12 × hidden size, here of 2,048."""
_MOST_POSITIONS = 16
"""Limit on sequences × longest sequence in a packed microbatch, as a multiple of the token budget."""


def dealt(rows: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    """Return an order of rows whose consecutive parts, of `sizes` rows, cost about the same.

    Greedy: the most expensive row left goes to the cheapest part with room. A part's most expensive rows come first.
    rows: lengths in tokens of the sequences of each row.
    """
    costs = [sum(map(_cost, lengths)) for lengths in rows]
    parts: list[list[int]] = [[] for _ in sizes]
    cheapest = [(0.0, part) for part, size in enumerate(sizes) if size]
    heapify(cheapest)
    for index in sorted(range(len(rows)), key=lambda index: -costs[index]):
        cost, part = heappop(cheapest)
        parts[part].append(index)
        if len(parts[part]) < sizes[part]:
            heappush(cheapest, (cost + costs[index], part))
    return [index for part in parts for index in part]


def _cost(length: int) -> float:
    return length + length**2 / _EQUAL_COST


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
