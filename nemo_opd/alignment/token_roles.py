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
"""Token content → its role, or roles in order of importance. Without roles, the token is never paired."""

_NAMED = ("eos", "bos", "cls", "sep", "mask", "pad", "unk")
_ENDS_A_TURN = {"end_of_turn", "end_of_message", "eos"}
_LAST_RESORT = ("pad", "unk")
"""Roles that count only if an id has no other: pad and unk are often borrowed from eos."""


@dataclass(frozen=True, slots=True)
class RoleRow:
    id: int
    content: str
    roles: tuple[str, ...]
    """The most important first."""
    reserved: bool
    """Whether its vocabulary reserves it: paired only within one tokenizer, or if an override gives it a role."""


def roles_of(tokenizer: PreTrainedTokenizerBase, overrides: RoleOverrides | None = None) -> dict[int, tuple[str, ...]]:
    """Map ids to roles, the most important first, for special tokens and for added tokens with a known meaning.

    The order is: eos if the id is the tokenizer's eos; roles by content or chat template; the tokenizer's other names
    for the id; the generation config's. A special token without a known meaning has its own content as its role. An
    override applies to tokens with its content in either tokenizer.
    """
    named, generation, template = _named_ids(tokenizer), list(_generation_roles(tokenizer)), template_roles(tokenizer)
    roles: dict[int, tuple[str, ...]] = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        id_roles = ["eos"] if named.get("eos") == token_id else []
        content_roles = known_roles(token.content, token.special)
        id_roles += content_roles or ([template[token.content]] if token.content in template else [])
        if token.special:
            if named.get("eos") == token_id and _template_writes(tokenizer, token.content):
                id_roles.append("end_of_turn")
            id_roles += [role for role, named_id in named.items() if named_id == token_id]
            id_roles += [role for role, stop_id in generation if stop_id == token_id]
        if not id_roles and token.special:
            id_roles.append(token.content)
        if id_roles:
            roles[token_id] = _distinct_roles(id_roles)
    return roles | _override_roles(tokenizer, overrides or {})


def turn_end_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids whose role is to end a turn, a message or a sequence."""
    return frozenset(i for i, roles in roles_of(tokenizer).items() if _ENDS_A_TURN & set(roles))


def role_table(tokenizer: PreTrainedTokenizerBase, overrides: RoleOverrides | None = None) -> list[RoleRow]:
    """List all tokens with a role, ordered by id."""
    rows = []
    for token_id, roles in sorted(roles_of(tokenizer, overrides).items()):
        content = tokenizer.convert_ids_to_tokens(token_id)
        assert isinstance(content, str)
        rows.append(RoleRow(token_id, content, roles, roles == (content,) and is_reserved(content)))
    return rows


def _named_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids that the tokenizer names as role → id: `eos_token` as `eos`. Other names remain contents."""
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
    """Return whether the chat template writes eos, and so ends its turns with it."""
    template = tokenizer.chat_template or ""
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    return content in text or "eos_token" in text


def _distinct_roles(roles: Sequence[str]) -> tuple[str, ...]:
    """Remove duplicates, and pad and unk if there are other roles."""
    distinct = tuple(dict.fromkeys(roles))
    return tuple(role for role in distinct if role not in _LAST_RESORT) or distinct


def _override_roles(tokenizer: PreTrainedTokenizerBase, overrides: RoleOverrides) -> dict[int, tuple[str, ...]]:
    vocab = tokenizer.get_vocab() if overrides else {}
    return {
        vocab[content]: (roles,) if isinstance(roles, str) else tuple(roles)
        for content, roles in overrides.items()
        if content in vocab
    }
