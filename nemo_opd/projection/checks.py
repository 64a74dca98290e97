"""Checks of the maps and pieces of a projection. All raise ProjectionError."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_opd.errors import ProjectionError


def _integers(name: str, values: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.integer]:
    array = np.asarray(values)
    if array.shape != shape or array.dtype.kind not in "iu":
        raise ProjectionError(f"{name} must be integers {list(shape)}, not {array.dtype} {array.shape}")
    return array


def prefix_map(name: str, ids: ArrayLike | None, length: int, limit: int) -> NDArray[np.int32] | None:
    """Check a map [length] onto ids below `limit`, −1 for none."""
    if ids is None:
        return None
    array = _integers(name, ids, (length,))
    outside = np.flatnonzero((array < -1) | (array >= limit))
    if len(outside):
        raise ProjectionError(f"{name}[{outside[0]}] is {array[outside[0]]}, outside [-1, {limit})")
    return array.astype(np.int32)


def checked_byte_order(values: ArrayLike | None, size: int) -> NDArray[np.int32] | None:
    """Check `teacher_byte_order` [size, 3]."""
    if values is None:
        return None
    array = _integers("teacher_byte_order", values, (size, 3))
    order, begin, end = array.T
    if not np.array_equal(np.sort(order), np.arange(size)):
        raise ProjectionError(f"teacher_byte_order does not order the {size} teacher tokens: each comes once")
    wrong = np.flatnonzero((begin < 0) | (begin >= end) | (end > size))
    if len(wrong):
        raise ProjectionError(
            f"teacher_byte_order gives teacher id {wrong[0]} the range {begin[wrong[0]]} to {end[wrong[0]]} of {size}"
        )
    return array.astype(np.int32)


def checked_pieces(
    name: str, pieces: ArrayLike | None, ends_name: str, ends: ArrayLike | None, size: int, limit: int
) -> dict[str, NDArray[np.int32] | None]:
    """Check the pieces, ids below `limit`, of `size` tokens."""
    if pieces is None and ends is None:
        return {name: None, ends_name: None}
    if pieces is None or ends is None:
        raise ProjectionError(f"{name} and {ends_name} belong together; give both or neither")
    checked_ends, count = _integers(ends_name, ends, (size,)), len(np.asarray(pieces))
    if (np.diff(checked_ends, prepend=0) < 0).any() or (checked_ends[-1] if size else 0) != count:
        raise ProjectionError(f"{ends_name} must ascend from 0 to {count}, the number of {name}")
    ids = _integers(name, pieces, (count,))
    outside = np.flatnonzero((ids < 0) | (ids >= limit))
    if len(outside):
        raise ProjectionError(f"{name}[{outside[0]}] is {ids[outside[0]]}, outside [0, {limit})")
    return {name: ids.astype(np.int32), ends_name: checked_ends.astype(np.int32)}
