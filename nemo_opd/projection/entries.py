"""Assembly of a projection's rows from entries, and the cut to the heaviest of each row (methods.md §2.5)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nemo_opd.errors import ProjectionError
from nemo_opd.projection.matrix import ProjectionMatrix

_Arrays = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Indices and weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """(row, column, weight) entries in any order; a cell may occur several times."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    weights: NDArray[np.float64]
    later: NDArray[np.bool_]
    """Whether to sort it after other entries of equal weight."""

    @classmethod
    def concatenate(cls, *parts: Entries) -> Entries:
        return cls(
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.columns for part in parts]),
            np.concatenate([part.weights for part in parts]),
            np.concatenate([part.later for part in parts]),
        )

    def where(self, mask: NDArray[np.bool_]) -> Entries:
        return Entries(self.rows[mask], self.columns[mask], self.weights[mask], self.later[mask])

    def merged(self) -> Entries:
        """Return each cell once, with the sum of its weights, ordered by row and column."""
        order = np.lexsort((self.columns, self.rows))
        rows, columns = self.rows[order], self.columns[order]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
        starts = np.flatnonzero(is_first)
        if not len(starts):
            return self
        return Entries(
            rows[starts],
            columns[starts],
            np.add.reduceat(self.weights[order], starts),
            np.logical_and.reduceat(self.later[order], starts),
        )


def assemble(entries: Entries, num_rows: int, width: int) -> _Arrays:
    """Return teacher ids and weights [num_rows, width] of the heaviest entries of each row, with weights of sum 1.

    Weights of the same cell add up. Ties put entries that are not `later` first, then lower ids.
    """
    merged = entries.merged()
    order = np.lexsort((merged.columns, merged.later, -merged.weights, merged.rows))
    rows, columns, heaviest = merged.rows[order], merged.columns[order], merged.weights[order]
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)
    is_within = place < width
    rows, place = rows[is_within], place[is_within]
    indices = np.full((num_rows, width), -1, np.int32)
    weights = np.zeros((num_rows, width))
    indices[rows, place] = columns[is_within]
    weights[rows, place] = heaviest[is_within]
    return indices, _normalize(weights)


def with_entries(matrix: ProjectionMatrix, rows: NDArray[np.int64], new: Entries, width: int) -> _Arrays:
    """Reassemble `rows` of the matrix from old and new entries, cut to `width`; return the matrix's arrays."""
    place, column = np.nonzero(matrix.indices[rows] >= 0)
    row = rows[place]
    old = Entries(
        row,
        matrix.indices[row, column].astype(np.int64),
        matrix.weights[row, column].astype(np.float64),
        np.zeros(len(row), np.bool_),
    )
    row_indices, row_weights = assemble(Entries.concatenate(old, new), matrix.student_vocab_size, width)
    indices, weights = _widen(matrix, width)
    indices[rows], weights[rows] = -1, 0
    indices[rows, :width], weights[rows, :width] = row_indices[rows], row_weights[rows]
    return indices, weights


def sort_and_cut(matrix: ProjectionMatrix, top_k: int) -> ProjectionMatrix:
    """Sort the entries of each row by weight, cut to [V, top_k] and rescale to sum 1. Empty rows stay empty.

    Ties keep their order in the row: the passes put direct before reverse entries, then lower ids. Raises
    ProjectionError for top_k < 1.
    """
    check_width("top_k", top_k)
    indices, weights = _widen(matrix, top_k)
    order = np.argsort(np.where(indices >= 0, -weights, 1), axis=1, kind="stable")[:, :top_k]
    cut_weights = _normalize(np.take_along_axis(weights, order, axis=1))
    options = matrix.options.after("sort_and_cut", top_k=top_k)
    return replace(matrix, indices=np.take_along_axis(indices, order, axis=1), weights=cut_weights, options=options)


def check_width(name: str, width: int) -> None:
    """Raise ProjectionError if rows have no room for an entry."""
    if width < 1:
        raise ProjectionError(f"{name} is {width}, but a row needs room for one entry; give 1 or more")


def _normalize(weights: NDArray[np.floating]) -> NDArray[np.float32]:
    """Scale rows [V, K] to sum 1; rows without weight stay zero."""
    total = weights.sum(axis=1, keepdims=True, dtype=np.float64)
    return (weights / np.where(total > 0, total, 1)).astype(np.float32)


def _widen(matrix: ProjectionMatrix, width: int) -> _Arrays:
    """Copy the arrays, padded with empty entries to at least `width` columns."""
    room = ((0, 0), (0, max(0, width - matrix.top_k)))
    return np.pad(matrix.indices, room, constant_values=-1), np.pad(matrix.weights, room)
