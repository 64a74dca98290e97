"""The two-pointer merge over byte boundaries, in Numba (METHODS §1)."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

_jit = numba.njit(cache=True, nogil=True)

TEXT = -1
"""The class of a token that stands for bytes; any other stands outside the text and is a barrier."""

Bytes = NDArray[np.uint8]
Ends = NDArray[np.int64]
Ints = NDArray[np.int32]
Flags = NDArray[np.bool_]


@_jit
def spell(ids: Ends, classes: Ints, offsets: Ends, buffer: Bytes) -> tuple[Bytes, Ends, Ints]:
    """Bytes of a sequence [n], each token's end in them [S], each token's class [S]."""
    ends = np.empty(len(ids), np.int64)
    kinds = np.empty(len(ids), np.int32)
    total = 0
    for i in range(len(ids)):
        kinds[i] = classes[ids[i]]
        if kinds[i] == TEXT:
            total += offsets[ids[i] + 1] - offsets[ids[i]]
        ends[i] = total
    data = np.empty(total, np.uint8)
    for i in range(len(ids)):
        if kinds[i] == TEXT:
            start = offsets[ids[i]]
            begin = ends[i] - (offsets[ids[i] + 1] - start)
            for k in range(ends[i] - begin):
                data[begin + k] = buffer[start + k]
    return data, ends, kinds


@_jit
def _equal_prefix(a: Bytes, b: Bytes) -> int:
    n = 0
    limit = min(len(a), len(b))
    while n < limit and a[n] == b[n]:
        n += 1
    return n


@_jit
def _equal_suffix(a: Bytes, b: Bytes, limit: int) -> int:
    n = 0
    while n < limit and a[len(a) - 1 - n] == b[len(b) - 1 - n]:
        n += 1
    return n


@_jit
def _pair_barriers(
    i: int, i_end: int, j: int, j_end: int, s_kinds: Ints, t_kinds: Ints, matches: Flags,
    s_chunk: Ints, t_chunk: Ints, bounds: Ints, special: Flags, count: int,
) -> int:  # fmt: skip
    """Pair the barriers [i, i_end) and [j, j_end), which stand at one byte position, by role and in order."""
    for a in range(i, i_end):
        for b in range(j, j_end):
            if matches[s_kinds[a], t_kinds[b]]:
                s_chunk[a] = t_chunk[b] = count
                bounds[count] = (a, a + 1, b, b + 1)
                special[count] = True
                count += 1
                j = b + 1
                break
    return count


@_jit
def _walk(
    i: int, j: int, shift: int, limit: int, s_ends: Ends, t_ends: Ends, s_kinds: Ints, t_kinds: Ints, matches: Flags,
    s_chunk: Ints, t_chunk: Ints, bounds: Ints, special: Flags, count: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Merge from the common boundary before tokens i, j up to the last one at or before student byte `limit`.

    `shift` is what a student position is ahead of the teacher's. Returns the tokens after that boundary and the count.
    """
    position = s_ends[i - 1] if i else 0
    other = (t_ends[j - 1] if j else 0) + shift
    i_cut, j_cut, broken = i, j, False
    while True:
        if position == other:
            if position > limit:
                break
            if i > i_cut and j > j_cut and not broken:
                s_chunk[i_cut:i] = count
                t_chunk[j_cut:j] = count
                bounds[count] = (i_cut, i, j_cut, j)
                count += 1
            i_cut, j_cut, broken = i, j, False
            while i < len(s_kinds) and s_kinds[i] != TEXT:
                i += 1
            while j < len(t_kinds) and t_kinds[j] != TEXT:
                j += 1
            count = _pair_barriers(
                i_cut, i, j_cut, j, s_kinds, t_kinds, matches, s_chunk, t_chunk, bounds, special, count
            )
            i_cut, j_cut = i, j
        if position <= other:
            if i == len(s_kinds):
                break
            broken = broken or s_kinds[i] != TEXT
            position = s_ends[i]
            i += 1
        else:
            if j == len(t_kinds):
                break
            broken = broken or t_kinds[j] != TEXT
            other = t_ends[j] + shift
            j += 1
    return i_cut, j_cut, count


@_jit
def _resume(i: int, j: int, s_from: int, s_ends: Ends, t_ends: Ends, shift: int) -> tuple[int, int]:
    """The first common boundary at or after tokens i, j and student byte `s_from`, before any barrier at it."""
    position = s_ends[i - 1] if i else 0
    other = (t_ends[j - 1] if j else 0) + shift
    while position != other or position < s_from:
        if position <= other:
            position = s_ends[i]
            i += 1
        else:
            other = t_ends[j] + shift
            j += 1
    return i, j


@_jit
def _only_text(kinds: Ints, start: int, stop: int) -> bool:
    return bool(np.all(kinds[start:stop] == TEXT))


@_jit
def merge(
    s_data: Bytes, s_ends: Ends, s_kinds: Ints, t_data: Bytes, t_ends: Ends, t_kinds: Ints, matches: Flags
) -> tuple[Ints, Ints, Ints, Flags, Flags]:
    """Chunk ids [S] and [T], bounds [C, 4], special [C], inexact [C].

    The equal prefix and the equal suffix of the two byte streams are merged exactly; the tokens between them make one
    inexact chunk, or none where a barrier stands among them. A stream that ends inside the other was cut: what
    follows has no partner.
    """
    s_chunk = np.full(len(s_kinds), -1, np.int32)
    t_chunk = np.full(len(t_kinds), -1, np.int32)
    room = min(len(s_kinds), len(t_kinds))
    bounds = np.empty((room, 4), np.int32)
    special = np.zeros(room, np.bool_)
    inexact = np.zeros(room, np.bool_)
    shortest = min(len(s_data), len(t_data))
    prefix = _equal_prefix(s_data, t_data)
    i, j, count = _walk(
        0, 0, 0, prefix, s_ends, t_ends, s_kinds, t_kinds, matches, s_chunk, t_chunk, bounds, special, 0
    )
    if prefix < shortest:
        suffix = _equal_suffix(s_data, t_data, shortest - prefix)
        shift = len(s_data) - len(t_data)
        i_next, j_next = _resume(i, j, len(s_data) - suffix, s_ends, t_ends, shift)
        if i_next > i and j_next > j and _only_text(s_kinds, i, i_next) and _only_text(t_kinds, j, j_next):
            s_chunk[i:i_next] = count
            t_chunk[j:j_next] = count
            bounds[count] = (i, i_next, j, j_next)
            inexact[count] = True
            count += 1
        _, _, count = _walk(
            i_next, j_next, shift, len(s_data), s_ends, t_ends, s_kinds, t_kinds, matches, s_chunk, t_chunk, bounds,
            special, count,
        )  # fmt: skip
    return s_chunk, t_chunk, bounds[:count], special[:count], inexact[:count]


@_jit
def byte_flags(bounds: Ints, special: Flags, inexact: Flags, data: Bytes, ends: Ends) -> tuple[Flags, Flags]:
    """whitespace [C] and digit [C] of exact chunks, from the student's bytes."""
    whitespace = np.zeros(len(bounds), np.bool_)
    digit = np.zeros(len(bounds), np.bool_)
    for c in range(len(bounds)):
        if special[c] or inexact[c]:
            continue
        start = ends[bounds[c, 0] - 1] if bounds[c, 0] else 0
        spaces = digits = True
        for k in range(start, ends[bounds[c, 1] - 1]):
            byte = data[k]
            spaces = spaces and (byte == 32 or 9 <= byte <= 13)
            digits = digits and 48 <= byte <= 57
        whitespace[c], digit[c] = spaces, digits
    return whitespace, digit
