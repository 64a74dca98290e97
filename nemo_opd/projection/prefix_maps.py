"""Prefix maps: Φ, the longest student token that begins a teacher token, and Ψ, the longest shared token that begins a
token of either side (methods.md §2.6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.roles import RoleOverrides
from nemo_opd.projection.exact import natural_order
from nemo_opd.projection.matrix import ProjectionMatrix
from nemo_opd.projection.pair import Side, TokenizerPair, pair_of
from nemo_opd.projection.teacher_pieces import with_teacher_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def add_byte_prefix(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    roles: RoleOverrides | None = None,
) -> ProjectionMatrix:
    """Set `byte_prefix` [W], the longest student text token whose bytes begin the teacher token's.

    Also set `teacher_byte_order` [W, 3], with which the byte_prefix loss finds the tokens that begin with another
    token, and the student tokens that spell each teacher token (`teacher_pieces.py`).

    Among student ids with the same bytes, the exact partner is preferred, then the most natural id. Tokens that stand
    for a role map to the student token with the closest role. Tokens without such a student token, and holes, have −1.

    `roles` default to the matrix's. Raises ProjectionError for tokenizers of another pair.
    """
    return byte_prefix_pass(matrix, pair_of(matrix, student_tokenizer, teacher_tokenizer, roles))


def byte_prefix_pass(matrix: ProjectionMatrix, pair: TokenizerPair) -> ProjectionMatrix:
    student, teacher = pair.student, pair.teacher
    ids: dict[bytes, int] = {}
    for s in natural_order(student.pieces, student.is_text):
        ids.setdefault(student.contents[s], s)
    byte_prefix = _longest_prefixes(teacher, ids)
    single = {
        t: s
        for s, t in matrix.shared_pairs.tolist()
        if teacher.is_text[t] and student.is_text[s] and student.contents[s] == teacher.contents[t]
    } | dict(pair.nearest_student)
    for t, s in single.items():
        byte_prefix[t] = s
    contents = [content if is_text else b"" for content, is_text in zip(teacher.contents, teacher.is_text, strict=True)]
    options = matrix.options.after("byte_prefix", roles=pair.roles)
    mapped = replace(matrix, byte_prefix=byte_prefix, teacher_byte_order=byte_order(contents), options=options)
    return with_teacher_pieces(mapped, pair, ids, single)


def byte_order(pieces: Sequence[bytes]) -> NDArray[np.int32]:
    """Return [W, 3] from the bytes of each token: the tokens in byte order, and two bounds for each (methods.md §5.7).

    Column 0: the tokens in byte order, tokens without bytes last. Columns 1 and 2: the tokens whose bytes begin with
    token t's are order[begin[t] : end[t]]; for a token without bytes, that is the token itself.
    """
    texts = sorted((piece, token) for token, piece in enumerate(pieces) if piece)
    order = np.array([token for _, token in texts] + [t for t, piece in enumerate(pieces) if not piece], np.int64)
    begin = np.argsort(order)
    end = begin + 1
    open_tokens: list[tuple[bytes, int]] = []
    for at, (piece, token) in enumerate(texts):
        while open_tokens and not piece.startswith(open_tokens[-1][0]):
            end[open_tokens.pop()[1]] = at
        if open_tokens and open_tokens[-1][0] == piece:
            begin[token] = begin[open_tokens[-1][1]]
        open_tokens.append((piece, token))
    for _, token in open_tokens:
        end[token] = len(texts)
    return np.stack([order, begin, end], axis=1).astype(np.int32)


def add_shared_prefix(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    roles: RoleOverrides | None = None,
) -> ProjectionMatrix:
    """Set `student_shared_prefix` [V] and `teacher_shared_prefix` [W]: rows of `shared_pairs`, −1 for the rest cell.

    A text token maps to the longest shared text token whose bytes begin its bytes: its own pair, if it has one. A token
    that stands for a role maps to the pair with the closest role, otherwise to the rest cell.

    `roles` default to the matrix's. Raises ProjectionError for tokenizers of another pair.
    """
    return shared_prefix_pass(matrix, pair_of(matrix, student_tokenizer, teacher_tokenizer, roles))


def shared_prefix_pass(matrix: ProjectionMatrix, pair: TokenizerPair) -> ProjectionMatrix:
    shared = matrix.shared_pairs
    pair_of_student = {s: place for place, s in enumerate(shared[:, 0].tolist())}
    pair_of_teacher = {t: place for place, t in enumerate(shared[:, 1].tolist())}
    pair_of_bytes = _shared_bytes(pair, shared, pair_of_student)
    student, teacher = _longest_prefixes(pair.student, pair_of_bytes), _longest_prefixes(pair.teacher, pair_of_bytes)
    student[shared[:, 0]] = teacher[shared[:, 1]] = np.arange(len(shared))
    for s, t in pair.special.best.items():
        student[s] = pair_of_student.get(s, pair_of_teacher.get(t, -1))
    for t, s in pair.nearest_student.items():
        teacher[t] = pair_of_teacher.get(t, pair_of_student.get(s, -1))
    options = matrix.options.after("shared_prefix", roles=pair.roles)
    return replace(matrix, student_shared_prefix=student, teacher_shared_prefix=teacher, options=options)


def _shared_bytes(
    pair: TokenizerPair, shared: NDArray[np.int32], pair_of_student: Mapping[int, int]
) -> dict[bytes, int]:
    """Map the bytes of shared text tokens to their pair; among pairs with the same bytes, to the most natural one."""
    student, teacher = pair.student, pair.teacher
    is_shared = np.zeros(len(student.is_text), np.bool_)
    is_shared[shared[:, 0]] = student.is_text[shared[:, 0]] & teacher.is_text[shared[:, 1]]
    pair_of_bytes: dict[bytes, int] = {}
    for s in natural_order(student.pieces, is_shared):
        place = pair_of_student[s]
        if student.contents[s] == teacher.contents[int(shared[place, 1])]:
            pair_of_bytes.setdefault(student.contents[s], place)
    return pair_of_bytes


def _longest_prefixes(side: Side, values: Mapping[bytes, int]) -> NDArray[np.int32]:
    """Return, for each id, the value of its longest prefix among the keys; −1 for ids without one or without text."""
    longest = max(map(len, values), default=0)
    prefixes = np.full(len(side.is_text), -1, np.int32)
    for token_id in np.flatnonzero(side.is_text).tolist():
        content = side.contents[token_id]
        for length in range(min(len(content), longest), 0, -1):
            value = values.get(content[:length])
            if value is not None:
                prefixes[token_id] = value
                break
    return prefixes
