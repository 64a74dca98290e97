"""Pairs of ids with the same bytes (METHODS §2, step 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.pieces import Pieces


def exact_pairs(
    student: Pieces,
    teacher: Pieces,
    student_is_text: NDArray[np.bool_],
    teacher_is_text: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """One-to-one pairs [P, 2] (student id, teacher id) of equal bytes.

    Ids that share their bytes are taken in order of origin, then of id, on both sides: the first is paired with the
    first, the second with the second.
    """
    by_bytes: dict[tuple[bytes, int], int] = {}
    for token_id, key in _ranked(teacher, teacher_is_text):
        by_bytes[key] = token_id
    pairs = [(s, by_bytes[key]) for s, key in _ranked(student, student_is_text) if key in by_bytes]
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)


def _ranked(pieces: Pieces, is_text: NDArray[np.bool_]) -> Sequence[tuple[int, tuple[bytes, int]]]:
    """(id, (bytes, place among the ids with these bytes)) of all text."""
    contents = pieces.as_list()
    ids = np.flatnonzero(is_text)
    seen: dict[bytes, int] = {}
    ranked = []
    for token_id in ids[np.lexsort((ids, pieces.origin[ids]))].tolist():
        piece = contents[token_id]
        seen[piece] = place = seen.get(piece, -1) + 1
        ranked.append((token_id, (piece, place)))
    return ranked
