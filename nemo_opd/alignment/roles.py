"""Special tokens of two tokenizers paired by meaning instead of spelling (methods.md §1.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.pieces import Pieces, pieces_of
from nemo_opd.alignment.token_roles import RoleOverrides, is_reserved, role_table, roles_of
from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Roles = Mapping[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class SpecialTokens:
    """Ids of two tokenizers that stand outside the text, and their partners by meaning."""

    student_class: NDArray[np.int32]
    """[V]: −1 for text, otherwise a row of `matches`; row 0 for ids without a partner."""
    teacher_class: NDArray[np.int32]
    """[W]: −1 for text, otherwise a column of `matches`; column 0 for ids without a partner."""
    matches: NDArray[np.bool_]
    """[student classes, teacher classes]: whether the ids share a role."""
    pairs: tuple[tuple[int, int], ...]
    """One-to-one pairs (student id, teacher id), the closest roles first."""
    best: Mapping[int, int]
    """Student id → teacher id with the closest role, which several student ids may share."""


@dataclass(frozen=True, slots=True)
class RolePair:
    role: str
    """Role that both tokens have; without a partner, the student token's first role."""
    student: str
    teacher: str | None
    """Content of the closest teacher token."""
    one_to_one: bool
    """False if the teacher token is paired with another student token first."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    student: int
    teacher: int
    order: tuple[int, int, bool]
    """Sort key, closest first: distance of the roles, negated number of shared roles, whether the pair would break the
    identity of a tokenizer paired with itself.
    """


def pair_special_tokens(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    student_pieces: Pieces,
    teacher_pieces: Pieces,
    overrides: RoleOverrides | None = None,
) -> SpecialTokens:
    """Pair special tokens by role. An added token that is not special is text unless the other side has its role.

    Raises AlignmentError for an override whose token is in neither vocabulary.
    """
    contents = student.get_vocab().keys() | teacher.get_vocab().keys() if overrides else set()
    if unknown := next((content for content in overrides or () if content not in contents), None):
        raise AlignmentError(
            f"roles names the token {unknown!r}, which neither tokenizer has; write the content of a token"
        )
    same = student_pieces.fingerprint == teacher_pieces.fingerprint
    student_roles = _pairable(roles_of(student, overrides), same)
    teacher_roles = _pairable(roles_of(teacher, overrides), same)
    candidates = _candidates(student_roles, teacher_roles, same)
    ends = [c for c in candidates if student_roles[c.student][0] == teacher_roles[c.teacher][0] == "eos"]
    pairs = _one_to_one(candidates)
    if any(c.student not in pairs or c.teacher not in pairs.values() for c in ends):
        # One side has fewer end tokens than the other: pair the two that stop generation first.
        pairs = _one_to_one([*ends, *candidates])
    best = dict(pairs)
    for c in candidates:
        best.setdefault(c.student, c.teacher)
    student_class = _classes(student_pieces, sorted({c.student for c in candidates}))
    teacher_class = _classes(teacher_pieces, sorted({c.teacher for c in candidates}))
    matches = np.zeros((student_class.max(initial=0) + 1, teacher_class.max(initial=0) + 1), np.bool_)
    for c in candidates:
        matches[student_class[c.student], teacher_class[c.teacher]] = True
    return SpecialTokens(student_class, teacher_class, matches, tuple(pairs.items()), best)


def paired_roles(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    overrides: RoleOverrides | None = None,
) -> list[RolePair]:
    """Return the partner of every student token with a role, ordered by id; a reserved token only if it has one.

    Raises AlignmentError as TokenAligner does.
    """
    special = pair_special_tokens(
        student_tokenizer, teacher_tokenizer, pieces_of(student_tokenizer), pieces_of(teacher_tokenizer), overrides
    )
    teachers = {row.id: row for row in role_table(teacher_tokenizer, overrides)}
    one_to_one = set(special.pairs)
    listed = []
    for row in role_table(student_tokenizer, overrides):
        partner = teachers.get(special.best.get(row.id, -1))
        if partner is not None:
            role = next(role for role in row.roles if role in partner.roles)
            listed.append(RolePair(role, row.content, partner.content, (row.id, partner.id) in one_to_one))
        elif row.roles and not row.reserved:
            listed.append(RolePair(row.roles[0], row.content, None, False))
    return listed


def _pairable(roles: _Roles, same: bool) -> _Roles:
    """Keep roles that can pair tokens. A reserved token has a meaning only within its own tokenizer."""
    pairable = {i: tuple(role for role in names if same or not is_reserved(role)) for i, names in roles.items()}
    return {i: names for i, names in pairable.items() if names}


def _candidates(student_roles: _Roles, teacher_roles: _Roles, same: bool) -> list[_Candidate]:
    """Return pairs of tokens that share a role, the closest first: by the sum of the role's ranks on both sides."""
    teachers: dict[str, list[int]] = {}
    for t, roles in teacher_roles.items():
        for role in roles:
            teachers.setdefault(role, []).append(t)
    candidates = []
    for s, roles in student_roles.items():
        for t in {t for role in roles for t in teachers.get(role, ())}:
            shared = set(roles) & set(teacher_roles[t])
            distance = min(_rank(role, roles) + _rank(role, teacher_roles[t]) for role in shared)
            candidates.append(_Candidate(s, t, (distance, -len(shared), same and s != t)))
    return sorted(candidates, key=lambda c: (*c.order, c.student, c.teacher))


def _rank(role: str, roles: tuple[str, ...]) -> int:
    """Return the rank of a role. eos is the farthest, since which end token a tokenizer calls eos is a setting."""
    other_roles = [name for name in roles if name != "eos"]
    return len(other_roles) if role == "eos" else other_roles.index(role)


def _one_to_one(candidates: Iterable[_Candidate]) -> dict[int, int]:
    """Pair greedily: each candidate in order, if both its tokens are free."""
    pairs: dict[int, int] = {}
    paired_teachers = set()
    for c in candidates:
        if c.student not in pairs and c.teacher not in paired_teachers:
            pairs[c.student] = c.teacher
            paired_teachers.add(c.teacher)
    return pairs


def _classes(pieces: Pieces, with_partner: Sequence[int]) -> NDArray[np.int32]:
    classes = np.where(pieces.lengths == 0, 0, -1).astype(np.int32)
    classes[list(with_partner)] = np.arange(1, len(with_partner) + 1)
    return classes
