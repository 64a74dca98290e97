"""Φ, the byte-prefix map: teacher token → the longest student token that begins it (methods.md §2.6)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from nemo_opd.alignment.roles import RoleOverrides
from nemo_opd.projection.byte_order import byte_order
from nemo_opd.projection.exact import natural_order
from nemo_opd.projection.matrix import ProjectionMatrix, pair_of
from nemo_opd.projection.pair import TokenizerPair
from nemo_opd.projection.prefix import longest_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def add_byte_prefix(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    roles: RoleOverrides | None = None,
) -> ProjectionMatrix:
    """Set `byte_prefix` [W]: the longest student text token whose bytes are a prefix of the teacher token's.

    And `teacher_byte_order` [W, 3], by which the loss of that name finds the tokens that begin with another.
    Of student ids with the same bytes it is the exact partner, else the most natural one. Tokens that stand for a role
    go to the student token nearest in role; −1 is for those without, and for holes.
    `roles` are those of the matrix when not given. Raises ProjectionError for tokenizers of another pair.
    """
    return add_byte_prefix_of(matrix, pair_of(matrix, student_tokenizer, teacher_tokenizer, roles))


def add_byte_prefix_of(matrix: ProjectionMatrix, pair: TokenizerPair) -> ProjectionMatrix:
    """`add_byte_prefix` of tokenizers that were read before."""
    student, teacher = pair.student, pair.teacher
    ids: dict[bytes, int] = {}
    for s in natural_order(student.pieces, student.is_text):
        ids.setdefault(student.contents[s], s)
    texts = np.flatnonzero(teacher.is_text)
    byte_prefix = np.full(matrix.teacher_vocab_size, -1, np.int32)
    byte_prefix[texts] = longest_prefixes([teacher.contents[t] for t in texts.tolist()], ids)
    for s, t in matrix.shared_pairs.tolist():
        if teacher.is_text[t] and student.is_text[s] and student.contents[s] == teacher.contents[t]:
            byte_prefix[t] = s
    for t, s in pair.nearest_student.items():
        byte_prefix[t] = s
    contents = [content if is_text else b"" for content, is_text in zip(teacher.contents, teacher.is_text, strict=True)]
    options = matrix.options.after("byte_prefix", roles=pair.roles)
    return replace(matrix, byte_prefix=byte_prefix, teacher_byte_order=byte_order(contents), options=options)
