"""The two tokenizers of a projection, read once for all passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.merge import TEXT
from nemo_opd.alignment.pieces import Pieces, pieces_of
from nemo_opd.alignment.roles import RoleOverrides, SpecialTokens, pair_special_tokens
from nemo_opd.errors import ProjectionError
from nemo_opd.projection.matrix import ProjectionMatrix
from nemo_opd.projection.options import Roles, frozen_roles

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
