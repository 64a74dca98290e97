"""Student tokens with a partner of the same bytes or role (methods.md §2.1)."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Pair equal tokens, with one entry a row [V, 1]: text by bytes, special tokens by role. Other rows are empty.

    `roles` as for TokenAligner. A special token whose partner is already paired has a row that is not flagged exact.
    Raises AlignmentError for a tokenizer whose pieces cannot be exact and for roles of unknown tokens.
    """
    return exact_pass(read_pair(student_tokenizer, teacher_tokenizer, roles))


def exact_pass(pair: TokenizerPair) -> ProjectionMatrix:
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
    student: Pieces, teacher: Pieces, student_is_text: NDArray[np.bool_], teacher_is_text: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the one-to-one pairs [P, 2] (student id, teacher id) with equal bytes.

    Ids with the same bytes are ranked by origin, then by id, on both sides; equal ranks are paired.
    """
    by_bytes = {key: t for t, key in _with_ranks(teacher, teacher_is_text)}
    pairs = [(s, by_bytes[key]) for s, key in _with_ranks(student, student_is_text) if key in by_bytes]
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)


def _with_ranks(pieces: Pieces, is_text: NDArray[np.bool_]) -> Iterator[tuple[int, tuple[bytes, int]]]:
    """Yield (id, (bytes, rank among the ids with these bytes)) for all text tokens."""
    contents = pieces.as_list()
    seen: dict[bytes, int] = {}
    for token_id in natural_order(pieces, is_text):
        piece = contents[token_id]
        seen[piece] = place = seen.get(piece, -1) + 1
        yield token_id, (piece, place)


def natural_order(pieces: Pieces, mask: NDArray[np.bool_]) -> list[int]:
    """Return the ids in the mask: ordinary pieces, then byte-fallback pieces, then added tokens, each ordered by id."""
    ids = np.flatnonzero(mask)
    return ids[np.argsort(pieces.origin[ids], kind="stable")].tolist()
