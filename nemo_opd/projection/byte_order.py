"""Which tokens of a vocabulary begin with which others, as ranges of the tokens in byte order (methods.md §5.7)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_opd.errors import ProjectionError

ORDER, BEGIN, END = range(3)


def byte_order(pieces: Sequence[bytes]) -> NDArray[np.int32]:
    """[W, 3] from the bytes of each token; a token without bytes begins itself alone.

    Column ORDER: the tokens in byte order, those without bytes last. BEGIN and END: the tokens whose bytes begin with
    token t's own are order[begin[t] : end[t]].
    """
    texts = sorted((piece, token) for token, piece in enumerate(pieces) if piece)
    order = np.array([token for _, token in texts] + [t for t, piece in enumerate(pieces) if not piece], np.int64)
    begin = np.argsort(order)
    end = begin + 1
    open_tokens: list[tuple[bytes, int]] = []
    for at, (piece, token) in enumerate(texts):
        while open_tokens and not piece.startswith(open_tokens[-1][0]):
            end[open_tokens.pop()[1]] = at
        if open_tokens and open_tokens[-1][0] == piece:
            begin[token] = begin[open_tokens[-1][1]]
        open_tokens.append((piece, token))
    for _, token in open_tokens:
        end[token] = len(texts)
    return np.stack([order, begin, end], axis=1).astype(np.int32)


def checked_byte_order(values: ArrayLike, size: int) -> NDArray[np.int32]:
    """Raises ProjectionError for what no vocabulary of `size` tokens has."""
    array = np.asarray(values)
    if array.shape != (size, 3) or array.dtype.kind not in "iu":
        raise ProjectionError(f"teacher_byte_order must be integers [{size}, 3], not {array.dtype} {array.shape}")
    if not np.array_equal(np.sort(array[:, ORDER]), np.arange(size)):
        raise ProjectionError(f"teacher_byte_order does not order the {size} teacher tokens: each comes once")
    begin, end = array[:, BEGIN], array[:, END]
    wrong = np.flatnonzero((begin < 0) | (begin >= end) | (end > size))
    if len(wrong):
        raise ProjectionError(
            f"teacher_byte_order gives teacher id {wrong[0]} the range {begin[wrong[0]]} to {end[wrong[0]]} of {size}"
        )
    return array.astype(np.int32)
