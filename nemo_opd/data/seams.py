"""Seams: places in a text before which tokens do not depend on later text.

No token of the vocabulary spans a seam, so BPE's merges and a unigram model's best path treat its two sides separately.
Text before a seam is tokenized alike in all texts with the same beginning if the pre-tokenizer splits it alike: it
reads runs of one kind of character, and looks ahead within them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import Pieces

_MAX_TRIED = 256


def find_seam(pieces: Pieces, ids: NDArray[np.int32], start: int, stop: int) -> int | None:
    """Return an i in [start, stop), 0 < i < S, with a seam before token i; None if _MAX_TRIED places have none."""
    start = max(start, 1)
    if start >= stop:
        return None
    places = np.unique(np.linspace(start, stop - 1, _MAX_TRIED).astype(np.int64)).tolist()
    return next((i for i in places if is_seam(pieces, ids, i)), None)


def is_seam(pieces: Pieces, ids: NDArray[np.int32], i: int) -> bool:
    """Return whether no token spans the place before token i, 0 < i < S. False next to special and unknown tokens."""
    spellings, longest = _spellings_of(pieces)
    left_pieces = spelled(pieces, reversed(ids[max(0, i - longest) : i].tolist()), longest)[::-1]
    head = b"".join(left_pieces)[-longest:]
    tail = b"".join(spelled(pieces, ids[i : i + longest].tolist(), longest))[:longest]
    return bool(head and tail) and not any(
        _spans(spellings, head[start:], tail) for start in reversed(range(len(head)))
    )


def spelled(pieces: Pieces, ids: Iterable[int], num_bytes: int) -> list[bytes]:
    """Return the bytes of successive ids, up to an id without bytes, or until they have `num_bytes` bytes."""
    spellings: list[bytes] = []
    for token_id in ids:
        piece = pieces.bytes_of(token_id)
        if not piece or num_bytes <= 0:
            break
        spellings.append(piece)
        num_bytes -= len(piece)
    return spellings


def _spans(spellings: list[bytes], head: bytes, tail: bytes) -> bool:
    """Return whether some token consists of `head` and a beginning of `tail`."""
    for stop in range(1, len(tail) + 1):
        spelling = head + tail[:stop]
        index = bisect_left(spellings, spelling)
        if index == len(spellings) or not spellings[index].startswith(spelling):
            return False
        if spellings[index] == spelling:
            return True
    return False


@lru_cache(maxsize=8)
def _spellings_of(pieces: Pieces) -> tuple[list[bytes], int]:
    """Return the bytes of all tokens, sorted, and the length of the longest."""
    spellings = sorted(set(pieces.as_list()))
    return spellings, max(map(len, spellings))
