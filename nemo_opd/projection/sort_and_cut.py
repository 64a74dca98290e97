"""The heaviest entries of each row (methods.md §2.5)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nemo_opd.errors import ProjectionError
from nemo_opd.projection.entries import normalised, widened
from nemo_opd.projection.matrix import ProjectionMatrix


def sort_and_cut(matrix: ProjectionMatrix, top_k: int) -> ProjectionMatrix:
    """Rows [V, top_k]: the heaviest entries first, cut, of sum 1 again. Empty rows stay empty.

    At equal weight the order of the row stays, in which the passes put direct before reverse entries, then lower ids.
    Raises ProjectionError for top_k < 1.
    """
    if top_k < 1:
        raise ProjectionError(f"top_k is {top_k}, but a row needs room for one entry; give 1 or more")
    indices, weights = widened(matrix.indices, matrix.weights, top_k)
    order = np.argsort(np.where(indices >= 0, -weights, 1), axis=1, kind="stable")[:, :top_k]
    kept = normalised(np.take_along_axis(weights, order, axis=1))
    options = matrix.options.after("sort_and_cut", top_k=top_k)
    return replace(matrix, indices=np.take_along_axis(indices, order, axis=1), weights=kept, options=options)
