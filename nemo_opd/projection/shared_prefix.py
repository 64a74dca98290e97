"""Ψ_S and Ψ_T, the shared-prefix maps: a token → the longest shared token that begins it (methods.md §2.6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.roles import RoleOverrides
from nemo_opd.projection.exact import natural_order
from nemo_opd.projection.matrix import ProjectionMatrix, pair_of
from nemo_opd.projection.pair import Side, TokenizerPair
from nemo_opd.projection.prefix import longest_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def add_shared_prefix(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    roles: RoleOverrides | None = None,
) -> ProjectionMatrix:
    """Set `student_shared_prefix` [V] and `teacher_shared_prefix` [W]: rows of `shared_pairs`, −1 for the rest cell.

    A text token goes to the longest shared text token whose bytes are a prefix of its own, which is its own pair where
    it has one; a token that stands for a role goes to the pair nearest in role, else to the rest cell.
    `roles` are those of the matrix when not given. Raises ProjectionError for tokenizers of another pair.
    """
    return add_shared_prefix_of(matrix, pair_of(matrix, student_tokenizer, teacher_tokenizer, roles))


def add_shared_prefix_of(matrix: ProjectionMatrix, pair: TokenizerPair) -> ProjectionMatrix:
    """`add_shared_prefix` of tokenizers that were read before."""
    shared = matrix.shared_pairs
    of_student = {s: place for place, s in enumerate(shared[:, 0].tolist())}
    of_teacher = {t: place for place, t in enumerate(shared[:, 1].tolist())}
    known = _shared_bytes(pair, shared, of_student)
    student = _prefix_map(pair.student, known, of_student)
    teacher = _prefix_map(pair.teacher, known, of_teacher)
    for s, t in pair.special.best.items():
        student[s] = of_student.get(s, of_teacher.get(t, -1))
    for t, s in pair.nearest_student.items():
        teacher[t] = of_teacher.get(t, of_student.get(s, -1))
    options = matrix.options.after("shared_prefix", roles=pair.roles)
    return replace(matrix, student_shared_prefix=student, teacher_shared_prefix=teacher, options=options)


def _shared_bytes(pair: TokenizerPair, shared: NDArray[np.int32], of_student: Mapping[int, int]) -> dict[bytes, int]:
    """Bytes of the shared text tokens → their pair; of pairs with the same bytes the most natural one."""
    student, teacher = pair.student, pair.teacher
    is_shared = np.zeros(len(student.is_text), np.bool_)
    is_shared[shared[:, 0]] = student.is_text[shared[:, 0]] & teacher.is_text[shared[:, 1]]
    known: dict[bytes, int] = {}
    for s in natural_order(student.pieces, is_shared):
        place = of_student[s]
        if student.contents[s] == teacher.contents[int(shared[place, 1])]:
            known.setdefault(student.contents[s], place)
    return known


def _prefix_map(side: Side, known: Mapping[bytes, int], own: Mapping[int, int]) -> NDArray[np.int32]:
    texts = np.flatnonzero(side.is_text)
    found = np.full(len(side.is_text), -1, np.int32)
    found[texts] = longest_prefixes([side.contents[i] for i in texts.tolist()], known)
    found[list(own)] = list(own.values())
    return found
