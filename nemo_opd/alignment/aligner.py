"""Aligns the ids of a student and a teacher that stand for one text (METHODS §1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_opd.alignment.merge import byte_flags, merge, spell
from nemo_opd.alignment.pieces import Pieces, pieces_of
from nemo_opd.alignment.roles import RoleOverrides, pair_special_tokens
from nemo_opd.errors import AlignmentError
from nemo_opd.types import Alignment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenAligner:
    """Holds arrays only: cheap to pickle, safe to share between threads."""

    def __init__(
        self,
        student_tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
        *,
        roles: RoleOverrides | None = None,
    ) -> None:
        """`roles` adds to or replaces what is known of special tokens: token content → role or roles.

        Raises AlignmentError for a tokenizer whose pieces cannot be exact.
        """
        self.student_pieces = pieces_of(student_tokenizer)
        self.teacher_pieces = pieces_of(teacher_tokenizer)
        self._special = pair_special_tokens(
            student_tokenizer, teacher_tokenizer, self.student_pieces, self.teacher_pieces, roles
        )

    def align(
        self, student_ids: Sequence[int] | NDArray[np.integer], teacher_ids: Sequence[int] | NDArray[np.integer]
    ) -> Alignment:
        """Align two 1-D id sequences without padding, canonical or not. O(S + T).

        Raises AlignmentError for ids that are not a 1-D sequence of integers inside the vocabulary.
        """
        student, teacher = self.student_pieces, self.teacher_pieces
        s_ids = _checked(student_ids, "student", student)
        t_ids = _checked(teacher_ids, "teacher", teacher)
        s_data, s_ends, s_kinds = spell(s_ids, self._special.student_class, student.offsets, student.buffer)
        t_data, t_ends, t_kinds = spell(t_ids, self._special.teacher_class, teacher.offsets, teacher.buffer)
        s_chunk, t_chunk, bounds, special, inexact = merge(
            s_data, s_ends, s_kinds, t_data, t_ends, t_kinds, self._special.matches
        )
        whitespace, digit = byte_flags(bounds, special, inexact, s_data, s_ends)
        one_to_one = (bounds[:, 1] - bounds[:, 0] == 1) & (bounds[:, 3] - bounds[:, 2] == 1)
        return Alignment(s_chunk, t_chunk, bounds, one_to_one, inexact, special, whitespace, digit)


def _checked(ids: ArrayLike, side: str, pieces: Pieces) -> NDArray[np.int64]:
    array = np.asarray(ids)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise AlignmentError(
            f"{side}_ids must be a 1-D sequence of integers, not {array.dtype} of shape {array.shape}; "
            "align one sequence at a time, without padding"
        )
    outside = np.flatnonzero((array < 0) | (array >= pieces.vocab_size))
    if len(outside):
        position = int(outside[0])
        raise AlignmentError(
            f"{side}_ids[{position}] is {array[position]}, outside the vocabulary of size {pieces.vocab_size}; "
            f"were these ids made by the {side}'s tokenizer?"
        )
    return array.astype(np.int64)
