"""A pair of tokenizers, and the student tokens with a partner of the same bytes or role (methods.md §2.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.pieces import Pieces, name_of, pieces_of
from nemo_opd.alignment.roles import SpecialTokens, pair_special_tokens
from nemo_opd.alignment.spelling import TEXT
from nemo_opd.alignment.token_roles import RoleOverrides
from nemo_opd.errors import ProjectionError
from nemo_opd.projection.io import BuilderOptions, Roles, frozen_roles
from nemo_opd.projection.matrix import ProjectionMatrix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    pieces: Pieces
    contents: list[bytes]
    """Bytes of every id; empty for special tokens and holes."""
    is_text: NDArray[np.bool_]
    """Whether an id stands for its bytes rather than for a role."""

    @property
    def text_contents(self) -> list[bytes]:
        """Bytes of every id that stands for its bytes, otherwise none."""
        return [content if is_text else b"" for content, is_text in zip(self.contents, self.is_text, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerPair:
    student: Side
    teacher: Side
    special: SpecialTokens
    roles: Roles
    """Overrides used to pair `special`."""
    nearest_student: Mapping[int, int]
    """Teacher id → student id with the closest role, its own partner first, for every teacher id with a partner by
    role.
    """


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


def read_pair(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    roles: RoleOverrides | None = None,
) -> TokenizerPair:
    """Read both tokenizers. Raises AlignmentError for inexact pieces and for roles of unknown tokens."""
    student, teacher = pieces_of(student_tokenizer), pieces_of(teacher_tokenizer)
    frozen = frozen_roles(roles)
    special = pair_special_tokens(student_tokenizer, teacher_tokenizer, student, teacher, dict(frozen))
    backward = pair_special_tokens(teacher_tokenizer, student_tokenizer, teacher, student, dict(frozen))
    return TokenizerPair(
        student=Side(student_tokenizer, student, student.as_list(), special.student_class == TEXT),
        teacher=Side(teacher_tokenizer, teacher, teacher.as_list(), special.teacher_class == TEXT),
        special=special,
        roles=frozen,
        nearest_student={**backward.best, **{t: s for s, t in special.pairs}},
    )


def pair_of(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    roles: RoleOverrides | None = None,
) -> TokenizerPair:
    """Read the tokenizers of `matrix`. The matrix's own roles are used unless others are given.

    Raises ProjectionError if the matrix was made for other tokenizers, AlignmentError as `read_pair` does.
    """
    pair = read_pair(student_tokenizer, teacher_tokenizer, dict(matrix.options.roles) if roles is None else roles)
    _check_side("student", matrix.student_fingerprint, matrix.student_vocab_size, pair.student.pieces)
    _check_side("teacher", matrix.teacher_fingerprint, matrix.teacher_vocab_size, pair.teacher.pieces)
    return pair


def _check_side(side: str, fingerprint: str, vocab_size: int, pieces: Pieces) -> None:
    if vocab_size != pieces.vocab_size or fingerprint not in ("", pieces.fingerprint):
        raise ProjectionError(
            f"the projection was made for another {side} tokenizer ({vocab_size} ids, "
            f"fingerprint {fingerprint[:12] or 'unknown'}; the one given has {pieces.vocab_size} ids, fingerprint "
            f"{pieces.fingerprint[:12]}); give the tokenizer it was built from, or build the projection of this pair"
        )
