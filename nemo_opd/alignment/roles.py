"""Which special tokens of two tokenizers mean the same: pairs by meaning instead of spelling (methods.md §1.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.known_roles import is_reserved
from nemo_opd.alignment.pieces import Pieces, pieces_of
from nemo_opd.alignment.token_roles import RoleOverrides, RoleRow, role_table, roles_of
from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "RoleOverrides",
    "RolePair",
    "RoleRow",
    "SpecialTokens",
    "pair_special_tokens",
    "paired_roles",
    "role_table",
    "roles_of",
]

_Roles = Mapping[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class SpecialTokens:
    """Which ids of a pair of tokenizers stand outside the text, and which of them mean the same."""

    student_class: NDArray[np.int32]
    """[V]: −1 for text; others are rows of `matches`, 0 where an id has no partner."""
    teacher_class: NDArray[np.int32]
    """[W]: likewise, columns of `matches`."""
    matches: NDArray[np.bool_]
    """[student classes, teacher classes]: the ids share a role."""
    pairs: tuple[tuple[int, int], ...]
    """One-to-one (student id, teacher id), the nearest in role first."""
    best: Mapping[int, int]
    """Every student id with a partner → the teacher id nearest in role; the teacher id may serve several."""


@dataclass(frozen=True, slots=True)
class RolePair:
    role: str
    """The role that both have; the student token's first where it has no partner."""
    student: str
    teacher: str | None
    """Content of the nearest teacher token."""
    one_to_one: bool
    """False where the teacher token stands for another student token first."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    student: int
    teacher: int
    order: tuple[int, int, bool]
    """Nearest first: the distance in role, the number of shared roles negated, whether a tokenizer paired with itself
    would be anything but the identity."""


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
    _check_overrides(student, teacher, overrides or {})
    same = student_pieces.fingerprint == teacher_pieces.fingerprint
    student_roles = _pairable(roles_of(student, overrides), same)
    teacher_roles = _pairable(roles_of(teacher, overrides), same)
    candidates = _candidates(student_roles, teacher_roles, same)
    ends = [c for c in candidates if student_roles[c.student][0] == teacher_roles[c.teacher][0] == "eos"]
    pairs = _one_to_one(candidates)
    if any(c.student not in pairs or c.teacher not in pairs.values() for c in ends):
        # One side has fewer ends than the other: the two that generation stops at come first.
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
    """Return the partner of every student token with a role, by id; reserved tokens only where they have one.

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
    """Keep the roles by which tokens can be paired; a reserved token means something to its own tokenizer alone."""
    kept = {i: tuple(role for role in names if same or not is_reserved(role)) for i, names in roles.items()}
    return {i: names for i, names in kept.items() if names}


def _candidates(student_roles: _Roles, teacher_roles: _Roles, same: bool) -> list[_Candidate]:
    """Return tokens that share a role, the nearest first, by the sum of the shared role's places on both sides."""
    teachers: dict[str, list[int]] = {}
    for t, roles in teacher_roles.items():
        for role in roles:
            teachers.setdefault(role, []).append(t)
    candidates = []
    for s, roles in student_roles.items():
        for t in {t for role in roles for t in teachers.get(role, ())}:
            shared = set(roles) & set(teacher_roles[t])
            distance = min(_place(role, roles) + _place(role, teacher_roles[t]) for role in shared)
            candidates.append(_Candidate(s, t, (distance, -len(shared), same and s != t)))
    return sorted(candidates, key=lambda c: (*c.order, c.student, c.teacher))


def _place(role: str, roles: tuple[str, ...]) -> int:
    """Return the place of a role; eos is the farthest, as which end a tokenizer calls eos is a setting."""
    others = [name for name in roles if name != "eos"]
    return len(others) if role == "eos" else others.index(role)


def _one_to_one(candidates: Iterable[_Candidate]) -> dict[int, int]:
    """Pair greedily: each candidate in order whose tokens are both free."""
    pairs: dict[int, int] = {}
    taken = set()
    for c in candidates:
        if c.student not in pairs and c.teacher not in taken:
            pairs[c.student] = c.teacher
            taken.add(c.teacher)
    return pairs


def _classes(pieces: Pieces, with_partner: Sequence[int]) -> NDArray[np.int32]:
    classes = np.where(pieces.lengths == 0, 0, -1).astype(np.int32)
    classes[list(with_partner)] = np.arange(1, len(with_partner) + 1)
    return classes


def _check_overrides(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, overrides: RoleOverrides
) -> None:
    known = student.get_vocab().keys() | teacher.get_vocab().keys() if overrides else set()
    for content in overrides:
        if content not in known:
            raise AlignmentError(
                f"roles names the token {content!r}, which neither tokenizer has; write the content of a token"
            )
