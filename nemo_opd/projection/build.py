"""Builds the projection of a pair of tokenizers (METHODS §2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nemo_opd.alignment.backend import name_of
from nemo_opd.alignment.merge import TEXT
from nemo_opd.alignment.pieces import pieces_of
from nemo_opd.alignment.roles import RoleOverrides, pair_special_tokens
from nemo_opd.errors import ProjectionError
from nemo_opd.projection.exact import exact_pairs
from nemo_opd.projection.matrix import ProjectionMatrix
from nemo_opd.projection.multi_token import Progress, decayed_row, spell_with

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_projection(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    top_k: int = 4,
    progress: Progress | None = None,
    *,
    roles: RoleOverrides | None = None,
) -> ProjectionMatrix:
    """Student token → the teacher tokens that spell it: the same bytes or role, else the teacher's pieces of its bytes.

    `roles` as for TokenAligner. Rows of special tokens without a partner and of holes stay empty.
    Raises AlignmentError for a tokenizer whose pieces cannot be exact, ProjectionError for top_k < 1 or an empty map.
    """
    if top_k < 1:
        raise ProjectionError(f"top_k is {top_k}, but a row needs room for one entry; give 1 or more")
    student, teacher = pieces_of(student_tokenizer), pieces_of(teacher_tokenizer)
    special = pair_special_tokens(student_tokenizer, teacher_tokenizer, student, teacher, roles)
    student_is_text, teacher_is_text = special.student_class == TEXT, special.teacher_class == TEXT
    indices = np.full((student.vocab_size, top_k), -1, np.int32)
    weights = np.zeros((student.vocab_size, top_k), np.float32)
    exact = np.zeros(student.vocab_size, np.bool_)

    for s, t in special.best.items():
        indices[s, 0], weights[s, 0] = t, 1
    pairs = np.concatenate(
        [exact_pairs(student, teacher, student_is_text, teacher_is_text), np.array(special.pairs).reshape(-1, 2)]
    ).astype(np.int64)
    indices[pairs[:, 0], 0], weights[pairs[:, 0], 0], exact[pairs[:, 0]] = pairs[:, 1], 1, True

    rest = np.flatnonzero(student_is_text & ~exact).tolist()
    spelled = spell_with(teacher_tokenizer, teacher, [student.bytes_of(s) for s in rest], progress)
    for s, ids in zip(rest, spelled, strict=True):
        if ids is not None:
            row = decayed_row(ids, top_k)
            indices[s, : len(row.ids)], weights[s, : len(row.ids)] = row.ids, row.weights

    if (indices[:, 0] < 0).all():
        raise ProjectionError(
            f"no token of {name_of(student_tokenizer)} can be spelled with {name_of(teacher_tokenizer)}; "
            "a projection between them would be empty"
        )
    return ProjectionMatrix(
        indices,
        weights,
        exact,
        teacher_vocab_size=teacher.vocab_size,
        student_fingerprint=student.fingerprint,
        teacher_fingerprint=teacher.fingerprint,
        student_name=name_of(student_tokenizer),
        teacher_name=name_of(teacher_tokenizer),
    )
