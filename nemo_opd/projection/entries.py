"""Rows of a projection from a list of its entries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """(row, column, weight), in any order; a cell may come several times."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    weights: NDArray[np.float64]
    later: NDArray[np.bool_]
    """Goes behind other entries of its weight."""

    @classmethod
    def concatenate(cls, *parts: Entries) -> Entries:
        return cls(
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.columns for part in parts]),
            np.concatenate([part.weights for part in parts]),
            np.concatenate([part.later for part in parts]),
        )

    def where(self, kept: NDArray[np.bool_]) -> Entries:
        return Entries(self.rows[kept], self.columns[kept], self.weights[kept], self.later[kept])


def entries_of(indices: NDArray[np.int32], weights: NDArray[np.float32], rows: NDArray[np.int64]) -> Entries:
    """The entries of the given rows of [V, K] arrays."""
    place, column = np.nonzero(indices[rows] >= 0)
    row = rows[place]
    return Entries(
        row,
        indices[row, column].astype(np.int64),
        weights[row, column].astype(np.float64),
        np.zeros(len(row), np.bool_),
    )


def assemble(entries: Entries, num_rows: int, width: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Teacher ids and weights [num_rows, width] of the heaviest entries of each row, with weights of sum 1.

    The weights of a cell add up. At equal weight what is not `later` comes first, then the lower id.
    """
    merged = _merge(entries)
    order = np.lexsort((merged.columns, merged.later, -merged.weights, merged.rows))
    rows, columns, heaviest = merged.rows[order], merged.columns[order], merged.weights[order]
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = place < width
    rows, place = rows[kept], place[kept]
    indices = np.full((num_rows, width), -1, np.int32)
    weights = np.zeros((num_rows, width))
    indices[rows, place] = columns[kept]
    weights[rows, place] = heaviest[kept]
    return indices, normalised(weights)


def normalised(weights: NDArray[np.floating]) -> NDArray[np.float32]:
    """Rows [V, K] of sum 1; a row without weight stays so."""
    total = weights.sum(axis=1, keepdims=True, dtype=np.float64)
    return (weights / np.where(total > 0, total, 1)).astype(np.float32)


def _merge(entries: Entries) -> Entries:
    """Each cell once, ordered by row and column."""
    order = np.lexsort((entries.columns, entries.rows))
    rows, columns = entries.rows[order], entries.columns[order]
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    starts = np.flatnonzero(is_first)
    return Entries(
        rows[starts],
        columns[starts],
        np.add.reduceat(entries.weights[order], starts) if len(starts) else entries.weights,
        np.logical_and.reduceat(entries.later[order], starts) if len(starts) else entries.later,
    )


def widened(
    indices: NDArray[np.int32], weights: NDArray[np.float32], width: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Copies with empty entries up to `width` columns."""
    room = ((0, 0), (0, max(0, width - indices.shape[1])))
    return np.pad(indices, room, constant_values=-1), np.pad(weights, room)
