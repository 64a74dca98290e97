"""Chunks between common byte boundaries of two token sequences, in Numba (methods.md §1.2).

`spell` returns each side's bytes, `resync.equal_runs` finds which are equal, and `merge` finds the boundaries that both
sides cut and makes a chunk of the tokens between two neighbouring cuts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.spelling import TEXT, PieceTable, Spelling


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function without the interpreter, and cache its machine code in a folder that Numba can write to.

    Numba may find none: for example in a container whose user has no home and does not own the package.
    """
    try:
        return numba.njit(function, cache=True, nogil=True)
    except RuntimeError:
        return numba.njit(function, nogil=True)


_EXACT, _INEXACT, _SPECIAL = 0, 1, 2

_Ints = NDArray[np.int32]
_Flags = NDArray[np.bool_]


class _Chunks(NamedTuple):
    """Fields of `types.Alignment`, in its order, without the histories."""

    student_chunk_id: _Ints
    teacher_chunk_id: _Ints
    bounds: _Ints
    one_to_one: _Flags
    inexact: _Flags
    special: _Flags
    whitespace: _Flags
    digit: _Flags


@jit
def spell(ids: NDArray[np.int64], table: PieceTable) -> Spelling:
    """Spell ids [S], all within the table."""
    classes, offsets, buffer = table
    edges = np.zeros(len(ids) + 1, np.int64)
    for i, token in enumerate(ids):
        length = offsets[token + 1] - offsets[token] if classes[token] == TEXT else 0
        edges[i + 1] = edges[i] + length
    data = np.empty(edges[-1], np.uint8)
    for i, token in enumerate(ids):
        source = offsets[token] - edges[i]
        for k in range(edges[i], edges[i + 1]):
            data[k] = buffer[source + k]
    return Spelling(data, edges, classes[ids])


@jit
def merge(student: Spelling, teacher: Spelling, runs: NDArray[np.int64], matches: _Flags) -> _Chunks:
    """Merge two sequences into chunks. runs: their equal bytes, from `equal_runs`.

    Between neighbouring cuts of one run the bytes are equal. Tokens from the last cut of a run to the first cut of a
    later one form one inexact chunk, or none if a barrier is among them. Tokens after the last cut have no partner.
    Barriers at one cut are paired if `matches` says so.
    """
    cuts = _common_cuts(student.edges, teacher.edges, runs)
    bounds, kinds = _chunk_bounds(cuts, student.classes, teacher.classes, matches)
    whitespace, digit = _byte_flags(bounds, kinds, student)
    return _Chunks(
        _chunk_ids(bounds[:, 0:2], len(student.classes)),
        _chunk_ids(bounds[:, 2:4], len(teacher.classes)),
        bounds,
        (bounds[:, 1] - bounds[:, 0] == 1) & (bounds[:, 3] - bounds[:, 2] == 1),
        kinds == _INEXACT,
        kinds == _SPECIAL,
        whitespace,
        digit,
    )


@jit
def _common_cuts(s_edges: NDArray[np.int64], t_edges: NDArray[np.int64], runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find common cuts [N, 3]: number of tokens before it on either side, without barriers at the cut, and its run."""
    cuts = np.empty((len(s_edges) + len(t_edges), 3), np.int64)
    i = j = count = 0
    for run in range(len(runs)):
        s_start, t_start, length = runs[run]
        offset = 0
        while offset <= length:
            i = _first_edge(s_edges, i, s_start + offset)
            j = _first_edge(t_edges, j, t_start + offset)
            s_offset, t_offset = s_edges[i] - s_start, t_edges[j] - t_start
            offset = max(s_offset, t_offset)
            if s_offset == t_offset and offset <= length:
                cuts[count] = i, j, run
                count += 1
                offset += 1
    return cuts[:count]


@jit
def _first_edge(edges: NDArray[np.int64], i: int, position: int) -> int:
    """Return the first edge from i on at or after a position inside the stream."""
    while edges[i] < position:
        i += 1
    return i


@jit
def _chunk_bounds(
    cuts: NDArray[np.int64], s_classes: _Ints, t_classes: _Ints, matches: _Flags
) -> tuple[_Ints, NDArray[np.int8]]:
    """Return bounds [C, 4] and kinds [C] of barrier pairs at the cuts and of chunks between the cuts."""
    room = min(len(s_classes), len(t_classes))
    bounds = np.empty((room, 4), np.int32)
    kinds = np.empty(room, np.int8)
    count = s_free = t_free = 0
    for n in range(len(cuts)):
        i, j, run = cuts[n]
        s_text, t_text = _first_text(s_classes, i), _first_text(t_classes, j)
        for a in range(max(i, s_free), s_text):
            for b in range(max(j, t_free), t_text):
                if matches[s_classes[a], t_classes[b]]:
                    bounds[count], kinds[count] = (a, a + 1, b, b + 1), _SPECIAL
                    count, s_free, t_free = count + 1, a + 1, b + 1
                    break
        if n + 1 == len(cuts):
            break
        i_next, j_next, run_next = cuts[n + 1]
        if _only_text(s_classes, s_text, i_next) and _only_text(t_classes, t_text, j_next):
            bounds[count], kinds[count] = (s_text, i_next, t_text, j_next), _EXACT if run == run_next else _INEXACT
            count += 1
    return bounds[:count], kinds[:count]


@jit
def _first_text(classes: _Ints, i: int) -> int:
    """Return the first token from i on that is not a barrier."""
    while i < len(classes) and classes[i] != TEXT:
        i += 1
    return i


@jit
def _only_text(classes: _Ints, start: int, stop: int) -> bool:
    """Return whether [start, stop) contains tokens and no barrier."""
    for i in range(start, stop):
        if classes[i] != TEXT:
            return False
    return start < stop


@jit
def _chunk_ids(bounds: _Ints, length: int) -> _Ints:
    """Return the chunk of each token [length], or −1."""
    chunk_id = np.full(length, -1, np.int32)
    for c in range(len(bounds)):
        for i in range(bounds[c, 0], bounds[c, 1]):
            chunk_id[i] = c
    return chunk_id


@jit
def _byte_flags(bounds: _Ints, kinds: NDArray[np.int8], student: Spelling) -> tuple[_Flags, _Flags]:
    """Mark the exact chunks of ASCII white space, [C], and of ASCII digits, [C]."""
    whitespace, digit = np.zeros(len(bounds), np.bool_), np.zeros(len(bounds), np.bool_)
    for c in range(len(bounds)):
        spaces = digits = kinds[c] == _EXACT
        k, stop = student.edges[bounds[c, 0]], student.edges[bounds[c, 1]]
        while k < stop and (spaces or digits):
            byte = student.data[k]
            spaces = spaces and (byte == 32 or 9 <= byte <= 13)
            digits = digits and 48 <= byte <= 57
            k += 1
        whitespace[c], digit[c] = spaces, digits
    return whitespace, digit
