"""Packing of segments into rows by their lengths (methods.md §8.6): pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.compiled import jit

Lengths = NDArray[np.int64]
"""[N, M]: tokens of N segments for each of M models."""


def packed_rows(lengths: Lengths, limits: Sequence[int]) -> list[NDArray[np.int64]]:
    """Pack segments into rows within every model's token limit; return the segments of each row.

    Best fit decreasing: the largest first, each into the row with the least room left after it. A segment longer than a
    limit has a row to itself.
    """
    capacity = np.array(limits, np.int64)
    largest_first = np.argsort(-(lengths / capacity).max(1), kind="stable")
    row = _best_fit(lengths, capacity, largest_first)
    by_row = np.argsort(row, kind="stable")
    return np.split(by_row, np.flatnonzero(np.diff(row[by_row])) + 1) if len(row) else []


@jit
def _best_fit(lengths: Lengths, capacity: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of each segment [N]. Rows that cannot hold the shortest segment are no longer tried."""
    number, models = lengths.shape
    shortest = np.array([lengths[:, m].min() for m in range(models)])
    room = np.empty((number, models), np.int64)
    row = np.empty(number, np.int64)
    open_rows = np.empty(number, np.int64)
    num_rows, num_open = 0, 0
    for segment in order:
        best, least = -1, 0
        for place in range(num_open):
            room_left = room[open_rows[place]] - lengths[segment]
            if room_left.min() >= 0 and (best < 0 or room_left[0] < least):
                best, least = place, room_left[0]
        if best < 0:
            best = num_open
            open_rows[best] = num_rows
            room[num_rows] = capacity
            num_rows, num_open = num_rows + 1, num_open + 1
        target = open_rows[best]
        row[segment] = target
        room[target] -= lengths[segment]
        if (room[target] < shortest).any():
            num_open -= 1
            open_rows[best] = open_rows[num_open]
    return row
