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
from nemo_opd.projection.options import Roles, frozen_roles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    pieces: Pieces
    contents: list[bytes]
    """The bytes of every id; none for special tokens and holes."""
    is_text: NDArray[np.bool_]
    """Ids that stand for their bytes and not for a role."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerPair:
    student: Side
    teacher: Side
    special: SpecialTokens
    roles: Roles
    """The overrides behind `special`."""
    nearest_student: Mapping[int, int]
    """Every teacher id that has a partner by role → the student id nearest in role, its own partner first."""


def read_pair(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    roles: RoleOverrides | None = None,
) -> TokenizerPair:
    """Raises AlignmentError for a tokenizer whose pieces cannot be exact and for roles of unknown tokens."""
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
