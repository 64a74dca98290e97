"""What special tokens mean, so that two tokenizers' can be paired by meaning instead of spelling (METHODS §1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.pieces import Pieces
from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RoleOverrides = Mapping[str, str | Sequence[str]]
"""Token content → its role, or its roles, the most important first. No roles: the token is never paired."""

_SPECIAL: dict[str, tuple[str, ...]] = {
    "end_of_turn": ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|eot|>", "<|end|>"),
    "end_of_text": ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<｜end▁of▁sentence｜>"),
    "bos": ("<|begin_of_text|>", "<bos>", "<s>", "<|startoftext|>", "<｜begin▁of▁sentence｜>"),
    "start_of_turn": (
        "<|im_start|>",
        "<|start_header_id|>",
        "<start_of_turn>",
        "<|turn>",
        "<|header_start|>",
        "<|start|>",
    ),
    "end_of_header": ("<|end_header_id|>", "<|header_end|>", "<|message|>", "<|im_middle|>"),
    "pad": ("<pad>", "<|pad|>", "<|finetune_right_pad_id|>"),
    "unk": ("<unk>",),
    "mask": ("<mask>",),
}
"""Well-known contents of tokens that are marked special. Others may be text: `</s>` is also an HTML tag."""
_MARKS: dict[str, tuple[str, ...]] = {
    "think_start": ("<think>", "<|begin_of_thought|>", "[THINK]"),
    "think_end": ("</think>", "<|end_of_thought|>", "[/THINK]"),
    "tool_call_start": ("<tool_call>", "<|tool_call|>", "<|tool_call_begin|>", "[TOOL_CALLS]"),
    "tool_call_end": ("</tool_call>", "<|/tool_call|>", "<|tool_call_end|>"),
    "tool_response_start": ("<tool_response>", "<|tool_response|>", "[TOOL_RESULTS]"),
    "tool_response_end": ("</tool_response>", "<|/tool_response|>", "[/TOOL_RESULTS]"),
    "fim_prefix": ("<|fim_prefix|>", "<fim_prefix>"),
    "fim_middle": ("<|fim_middle|>", "<fim_middle>"),
    "fim_suffix": ("<|fim_suffix|>", "<fim_suffix>"),
}
"""Well-known contents of added tokens, which some tokenizers mark special and others do not."""
_MARK_ROLES = {content: role for role, contents in _MARKS.items() for content in contents}
_ROLES = _MARK_ROLES | {content: role for role, contents in _SPECIAL.items() for content in contents}
_LAST_RESORT = ("pad", "unk")
"""Roles an id has only where it has no other: pad and unk are often borrowed from eos."""


def roles_of(tokenizer: PreTrainedTokenizerBase, overrides: RoleOverrides | None = None) -> dict[int, tuple[str, ...]]:
    """id → its roles, the most important first, for special tokens and for added tokens with a known meaning.

    eos comes first wherever an id is eos. A special token that means nothing known has its own content as its role.
    An override counts for a token of that content in either tokenizer.
    """
    named = list(_named_ids(tokenizer))
    roles: dict[int, tuple[str, ...]] = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        known = [role for role, named_id in named if named_id == token_id]
        if content_role := (_ROLES if token.special else _MARK_ROLES).get(token.content):
            known.append(content_role)
        if "eos" in known and _template_writes(tokenizer, token.content):
            known.append("end_of_turn")
        if not known and token.special:
            known.append(token.content)
        if known:
            roles[token_id] = _ordered(known)
    return roles | _overridden(tokenizer, overrides or {})


def _named_ids(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, int]]:
    """The tokenizer's own map (`eos_token` → id), as roles: `eos`."""
    named = [(name, str(token)) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)]
    for name, content in sorted(named, key=lambda item: item[0] != "eos_token"):
        token_id = tokenizer.convert_tokens_to_ids(content)
        if isinstance(token_id, int):
            yield name.removesuffix("_token"), token_id


def _template_writes(tokenizer: PreTrainedTokenizerBase, content: str) -> bool:
    """A chat template that writes eos ends its turns with it."""
    template = tokenizer.chat_template or ""
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    return content in text or "eos_token" in text


def _ordered(roles: Sequence[str]) -> tuple[str, ...]:
    """Without repetitions; pad and unk only where nothing else is known."""
    distinct = tuple(dict.fromkeys(roles))
    return tuple(role for role in distinct if role not in _LAST_RESORT) or distinct


def _overridden(tokenizer: PreTrainedTokenizerBase, overrides: RoleOverrides) -> dict[int, tuple[str, ...]]:
    vocab = tokenizer.get_vocab() if overrides else {}
    return {
        vocab[content]: (roles,) if isinstance(roles, str) else tuple(roles)
        for content, roles in overrides.items()
        if content in vocab
    }


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
    """One-to-one (student id, teacher id), the most important roles first."""
    best: Mapping[int, int]
    """Every student id with a partner → the teacher id nearest in role; the teacher id may serve several."""


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
    student_roles, teacher_roles = roles_of(student, overrides), roles_of(teacher, overrides)
    candidates = _candidates(student_roles, teacher_roles, student_pieces, teacher_pieces)
    best: dict[int, int] = {}
    pairs, used = [], set()
    for _, s, t in candidates:
        if s not in best and t not in used:
            pairs.append((s, t))
            used.add(t)
            best[s] = t
    for _, s, t in candidates:
        best.setdefault(s, t)
    student_class = _classes(student_pieces, sorted({s for _, s, _ in candidates}))
    teacher_class = _classes(teacher_pieces, sorted({t for _, _, t in candidates}))
    matches = np.zeros((student_class.max(initial=0) + 1, teacher_class.max(initial=0) + 1), np.bool_)
    for _, s, t in candidates:
        matches[student_class[s], teacher_class[t]] = True
    return SpecialTokens(student_class, teacher_class, matches, tuple(pairs), best)


def _candidates(
    student_roles: Mapping[int, tuple[str, ...]],
    teacher_roles: Mapping[int, tuple[str, ...]],
    student_pieces: Pieces,
    teacher_pieces: Pieces,
) -> list[tuple[tuple[int, bool], int, int]]:
    """(distance, student id, teacher id) of all that share a role, nearest first.

    The distance is the sum of the shared role's places in the two lists, then whether the ids differ in their place
    among the equals, which makes a tokenizer paired with itself the identity.
    """
    teachers: dict[str, list[tuple[int, int]]] = {}
    for t, roles in teacher_roles.items():
        for place, role in enumerate(roles):
            teachers.setdefault(role, []).append((place, t))
    same = student_pieces.fingerprint == teacher_pieces.fingerprint
    nearest: dict[tuple[int, int], int] = {}
    for s, roles in student_roles.items():
        for place, role in enumerate(roles):
            for other, t in teachers.get(role, ()):
                nearest[s, t] = min(place + other, nearest.get((s, t), place + other))
    return sorted(((distance, same and s != t), s, t) for (s, t), distance in nearest.items())


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
