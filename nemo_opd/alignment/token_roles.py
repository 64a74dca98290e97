"""Roles of a tokenizer's special tokens (methods.md §1.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_opd.alignment.generation_config import generation_ids
from nemo_opd.alignment.known_roles import is_reserved, known_roles
from nemo_opd.alignment.template_roles import template_roles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RoleOverrides = Mapping[str, str | Sequence[str]]
"""Token content → its role, or its roles, the most important first. No roles: the token is never paired."""

_NAMED = ("eos", "bos", "cls", "sep", "mask", "pad", "unk")
_ENDS_A_TURN = {"end_of_turn", "end_of_message", "eos"}
_LAST_RESORT = ("pad", "unk")
"""Roles an id has only where it has no other: pad and unk are often borrowed from eos."""


@dataclass(frozen=True, slots=True)
class RoleRow:
    id: int
    content: str
    roles: tuple[str, ...]
    """The most important first."""
    reserved: bool
    """Kept free by its vocabulary: paired only by a tokenizer with itself, or where an override gives it a role."""


def roles_of(tokenizer: PreTrainedTokenizerBase, overrides: RoleOverrides | None = None) -> dict[int, tuple[str, ...]]:
    """Map ids to roles, the most important first, for special tokens and for added tokens with a known meaning.

    eos comes first wherever an id is the tokenizer's eos, then what the content or the chat template tells, then the
    tokenizer's other names for it, then the generation config's. A special token that means nothing known has its own
    content as its role. An override counts for a token of that content in either tokenizer.
    """
    named, generation, template = _named_ids(tokenizer), list(_generation_roles(tokenizer)), template_roles(tokenizer)
    roles: dict[int, tuple[str, ...]] = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        known = ["eos"] if named.get("eos") == token_id else []
        content_roles = known_roles(token.content, token.special)
        known += content_roles or ([template[token.content]] if token.content in template else [])
        if token.special:
            if named.get("eos") == token_id and _template_writes(tokenizer, token.content):
                known.append("end_of_turn")
            known += [role for role, named_id in named.items() if named_id == token_id]
            known += [role for role, stop_id in generation if stop_id == token_id]
        if not known and token.special:
            known.append(token.content)
        if known:
            roles[token_id] = _ordered(known)
    return roles | _overridden(tokenizer, overrides or {})


def turn_end_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that end a turn, a message or a sequence by their role."""
    return frozenset(i for i, roles in roles_of(tokenizer).items() if _ENDS_A_TURN & set(roles))


def role_table(tokenizer: PreTrainedTokenizerBase, overrides: RoleOverrides | None = None) -> list[RoleRow]:
    """Tabulate all tokens with a role, by id."""
    rows = []
    for token_id, roles in sorted(roles_of(tokenizer, overrides).items()):
        content = tokenizer.convert_ids_to_tokens(token_id)
        assert isinstance(content, str)
        rows.append(RoleRow(token_id, content, roles, roles == (content,) and is_reserved(content)))
    return rows


def _named_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the tokenizer's own map (`eos_token` → id), as roles: `eos`. Other names keep their content as role."""
    named = {}
    for role in _NAMED:
        content = tokenizer.special_tokens_map.get(f"{role}_token")
        token_id = tokenizer.convert_tokens_to_ids(str(content)) if content is not None else None
        if isinstance(token_id, int):
            named[role] = token_id
    return named


def _generation_roles(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, int]]:
    ids = generation_ids(tokenizer)
    for role, role_ids in (("eos", ids.eos), ("bos", ids.bos), ("pad", ids.pad)):
        yield from ((role, token_id) for token_id in role_ids)


def _template_writes(tokenizer: PreTrainedTokenizerBase, content: str) -> bool:
    """Return whether the chat template writes eos, with which it then ends its turns."""
    template = tokenizer.chat_template or ""
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    return content in text or "eos_token" in text


def _ordered(roles: Sequence[str]) -> tuple[str, ...]:
    """Remove repetitions, and pad and unk unless nothing else is known."""
    distinct = tuple(dict.fromkeys(roles))
    return tuple(role for role in distinct if role not in _LAST_RESORT) or distinct


def _overridden(tokenizer: PreTrainedTokenizerBase, overrides: RoleOverrides) -> dict[int, tuple[str, ...]]:
    vocab = tokenizer.get_vocab() if overrides else {}
    return {
        vocab[content]: (roles,) if isinstance(roles, str) else tuple(roles)
        for content, roles in overrides.items()
        if content in vocab
    }
