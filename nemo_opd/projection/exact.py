"""Student tokens that have a partner of the same bytes or role (methods.md §2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.backend import name_of
from nemo_opd.alignment.pieces import Pieces
from nemo_opd.alignment.roles import RoleOverrides
from nemo_opd.projection.matrix import ProjectionMatrix
from nemo_opd.projection.options import BuilderOptions
from nemo_opd.projection.pair import TokenizerPair, read_pair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def exact_map(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    roles: RoleOverrides | None = None,
) -> ProjectionMatrix:
    """One entry a row, [V, 1]: the teacher token of the same bytes, special tokens by role; other rows are empty.

    `roles` as for TokenAligner. A special token whose partner is taken has a row that is not flagged exact.
    Raises AlignmentError for a tokenizer whose pieces cannot be exact and for roles of unknown tokens.
    """
    return exact_map_of(read_pair(student_tokenizer, teacher_tokenizer, roles))


def exact_map_of(pair: TokenizerPair) -> ProjectionMatrix:
    """`exact_map` of tokenizers that were read before."""
    student, teacher = pair.student, pair.teacher
    indices = np.full((student.pieces.vocab_size, 1), -1, np.int32)
    for s, t in pair.special.best.items():
        indices[s, 0] = t
    text = exact_pairs(student.pieces, teacher.pieces, student.is_text, teacher.is_text)
    pairs = np.concatenate([text, np.array(pair.special.pairs, np.int64).reshape(-1, 2)])
    exact = np.zeros(len(indices), np.bool_)
    indices[pairs[:, 0], 0], exact[pairs[:, 0]] = pairs[:, 1], True
    return ProjectionMatrix(
        indices,
        (indices >= 0).astype(np.float32),
        exact,
        teacher_vocab_size=teacher.pieces.vocab_size,
        student_fingerprint=student.pieces.fingerprint,
        teacher_fingerprint=teacher.pieces.fingerprint,
        student_name=name_of(student.tokenizer),
        teacher_name=name_of(teacher.tokenizer),
        options=BuilderOptions(passes=("exact_map",), roles=pair.roles),
    )


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
    seen: dict[bytes, int] = {}
    ranked = []
    for token_id in natural_order(pieces, is_text):
        piece = contents[token_id]
        seen[piece] = place = seen.get(piece, -1) + 1
        ranked.append((token_id, (piece, place)))
    return ranked


def natural_order(pieces: Pieces, kept: NDArray[np.bool_]) -> list[int]:
    """The ids kept: ordinary pieces, then byte-fallback pieces, then added tokens, each in order of id."""
    ids = np.flatnonzero(kept)
    return ids[np.argsort(pieces.origin[ids], kind="stable")].tolist()
