"""Places at which the tokens before do not depend on what follows.

No token of the vocabulary spans a seam, so BPE's merges and a unigram model's best path treat its two sides apart. What
is before it is tokenized alike in every text that begins alike, as long as the pre-tokenizer cuts it alike: it reads
runs of one kind of character, and looks ahead within them.
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
    """Return an i in [start, stop), 0 < i < S, with a seam before token i; None where _MAX_TRIED places have none."""
    start = max(start, 1)
    if start >= stop:
        return None
    places = np.unique(np.linspace(start, stop - 1, _MAX_TRIED).astype(np.int64)).tolist()
    return next((i for i in places if is_seam(pieces, ids, i)), None)


def is_seam(pieces: Pieces, ids: NDArray[np.int32], i: int) -> bool:
    """Return whether no token spans the place before token i, 0 < i < S. Next to special and unknown tokens: False."""
    spellings, longest = _spellings_of(pieces)
    before = spelled(pieces, reversed(ids[max(0, i - longest) : i].tolist()), longest)[::-1]
    left = b"".join(before)[-longest:]
    right = b"".join(spelled(pieces, ids[i : i + longest].tolist(), longest))[:longest]
    return bool(left and right) and not any(
        _spans(spellings, left[start:], right) for start in reversed(range(len(left)))
    )


def spelled(pieces: Pieces, ids: Iterable[int], num_bytes: int) -> list[bytes]:
    """Return the bytes of each id, up to one without any, or until there are enough."""
    found: list[bytes] = []
    for token_id in ids:
        piece = pieces.bytes_of(token_id)
        if not piece or num_bytes <= 0:
            break
        found.append(piece)
        num_bytes -= len(piece)
    return found


def _spans(spellings: list[bytes], head: bytes, right: bytes) -> bool:
    """Return whether some token is all of `head` and a beginning of `right`."""
    for stop in range(1, len(right) + 1):
        wanted = head + right[:stop]
        at = bisect_left(spellings, wanted)
        if at == len(spellings) or not spellings[at].startswith(wanted):
            return False
        if spellings[at] == wanted:
            return True
    return False


@lru_cache(maxsize=8)
def _spellings_of(pieces: Pieces) -> tuple[list[bytes], int]:
    """Return the bytes of all tokens, sorted, and the number of bytes of the longest."""
    spellings = sorted(set(pieces.as_list()))
    return spellings, max(map(len, spellings))
