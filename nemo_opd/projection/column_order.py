"""Columns of a teacher's logits in the order of the student's tokens.

Losses read the teacher's logits of paired tokens, for some of the student's columns at a time. A GPU reads 32 bytes at
once, so a logit whose neighbours are not needed costs eight times its bytes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nemo_opd.projection.io import PIECE_ARRAYS
from nemo_opd.projection.matrix import ProjectionMatrix


def order_by_student(matrix: ProjectionMatrix, vocab_size: int) -> NDArray[np.int64]:
    """Return the ids of the first `vocab_size` teacher tokens, ordered by student token.

    A token's student token is its exact partner, or else the first one with it as an entry. Tokens without one come
    last. Tokens in only one of both vocabulary sizes are never moved before tokens in both.
    """
    student, slot = np.nonzero(matrix.weights > 0)
    first = np.full(max(vocab_size, matrix.teacher_vocab_size), matrix.student_vocab_size)
    np.minimum.at(first, matrix.indices[student, slot], student)
    paired_students, paired_teachers = matrix.shared_pairs.T
    first[paired_teachers] = paired_students
    return np.argsort(first[:vocab_size], kind="stable")


def with_columns(matrix: ProjectionMatrix, order: NDArray[np.int64]) -> ProjectionMatrix:
    """Replace teacher ids by columns: column c is the token order[c], from `order_by_student`.

    Ids beyond the order stay the same. The result belongs to reordered logits, not to a tokenizer.
    """
    size = matrix.teacher_vocab_size
    order = np.append(order, np.arange(len(order), size))[:size]
    column = np.argsort(order).astype(np.int32)
    maps = {
        name: values[order]
        for name in ("byte_prefix", "teacher_shared_prefix", "teacher_shared_spelling")
        if (values := getattr(matrix, name)) is not None
    }
    if (byte_order := matrix.teacher_byte_order) is not None:
        maps["teacher_byte_order"] = np.concatenate([column[byte_order[:, :1]], byte_order[order, 1:]], axis=1)
    for name, ends_name in PIECE_ARRAYS.items():
        if name.startswith("teacher") and (ends := getattr(matrix, ends_name)) is not None:
            lengths = np.diff(ends, prepend=0)[order]
            maps[ends_name] = lengths.cumsum()
            place = np.arange(lengths.sum()) + np.repeat(ends[order] - maps[ends_name], lengths)
            maps[name] = getattr(matrix, name)[place]
    return replace(matrix, indices=np.where(matrix.indices >= 0, column[matrix.indices], -1), **maps)
