"""Pieces of each teacher token: the student tokens that spell it (methods.md §2.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice

import numpy as np
from numpy.typing import NDArray

from nemo_opd.projection.matrix import ProjectionMatrix
from nemo_opd.projection.pair import TokenizerPair
from nemo_opd.projection.spelling import spell_with

_Pieces = list[list[int]]
"""Student tokens of each teacher token; empty for a token without an image."""


def with_teacher_pieces(
    matrix: ProjectionMatrix, pair: TokenizerPair, ids: Mapping[bytes, int], single: Mapping[int, int]
) -> ProjectionMatrix:
    """Set the pieces of the teacher's tokens in both forms.

    ids: student tokens keyed by their bytes. single: teacher token → the student token that is its only piece. Other
    text tokens have the pieces of the student's tokenizer or, if these do not come back byte for byte, the longest
    student tokens from the left.
    """
    teacher = pair.teacher
    several = [t for t in np.flatnonzero(teacher.is_text).tolist() if t not in single and teacher.contents[t]]
    contents = [teacher.contents[t] for t in several]
    longest = max(map(len, ids), default=0)
    prefixes: _Pieces = [[] for _ in teacher.contents]
    for t, s in single.items():
        prefixes[t] = [s]
    for t, content in zip(several, contents, strict=True):
        prefixes[t] = _longest_first(content, ids, longest)
    spellings = list(prefixes)
    spelled = spell_with(pair.student, contents)
    ids_of_spellings = iter(spelled.ids.tolist())
    for t, length in zip(several, np.bincount(spelled.content, minlength=len(several)).tolist(), strict=True):
        if length:
            spellings[t] = list(islice(ids_of_spellings, length))
    return replace(
        matrix,
        teacher_spellings=_flat(spellings),
        teacher_spelling_ends=_ends(spellings),
        teacher_prefix_pieces=_flat(prefixes),
        teacher_prefix_ends=_ends(prefixes),
    )


def _longest_first(content: bytes, ids: Mapping[bytes, int], longest: int) -> list[int]:
    """Cut bytes into the longest known tokens from the left, up to bytes that no token begins."""
    pieces, start = [], 0
    while start < len(content):
        lengths = range(min(len(content) - start, longest), 0, -1)
        length = next((length for length in lengths if content[start : start + length] in ids), 0)
        if not length:
            break
        pieces.append(ids[content[start : start + length]])
        start += length
    return pieces


def _flat(pieces: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    return np.fromiter(chain.from_iterable(pieces), np.int32)


def _ends(pieces: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    return np.fromiter(accumulate(map(len, pieces)), np.int32, len(pieces))
