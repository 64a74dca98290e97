"""Windows of a document that is too long for its models to read at once (methods.md §8.6): pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
"""[P, M]: places in a document, as the number of tokens before them for each of M models; columns are non-decreasing.
"""


def common_places(length: int, starts: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]], ends: Places) -> Places:
    """Return the token boundaries that all models of a document share.

    length: number of the student's tokens. starts: for each teacher with another tokenizer, the first tokens of the
    aligned chunks, the student's [C] and the teacher's [C]. ends: [M], numbers of tokens of the student and these
    teachers.
    """
    places = np.arange(length, dtype=np.int64)
    for ours, _ in starts:
        places = np.intersect1d(places, ours)
    theirs = [first_tokens[np.searchsorted(ours, places)] for ours, first_tokens in starts]
    common = np.column_stack([places, *theirs]).astype(np.int64)
    return np.concatenate([np.zeros_like(ends)[None], common[(common > 0).any(1)], ends[None]])


def window_edges(places: Places, limits: Sequence[int], openings: Sequence[int]) -> Places:
    """Cut a document into windows as long as its models can read: edges [windows + 1, M].

    Windows end at `places`. If two of these are too far apart, the text between them is cut into equal parts. limits:
    longest input of each model, in its tokens. openings: tokens in front of each window but the first.
    """
    room = np.array(limits) - np.array(openings)
    places, at = places.copy("F"), 0
    edges = [places[0].copy()]
    while at < len(places) - 1:
        last = places[at] + (room if len(edges) > 1 else np.array(limits))
        reached = (
            min(int(np.searchsorted(column, most, "right")) for column, most in zip(places.T, last, strict=True)) - 1
        )
        if reached > at:
            at = reached
            edges.append(places[at].copy())
            continue
        begin, gap = places[at], places[at + 1] - places[at]
        parts = int((-(-gap // room)).max())
        edges += [begin + gap * part // parts for part in range(1, parts)]
        places[at] = edges[-1]
    return np.stack(edges)
