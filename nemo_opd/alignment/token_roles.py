"""Roles of a tokenizer's special tokens: by its own names, its generation config, its chat template, and known contents
(methods.md §1.4).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_opd.alignment.chat_turns import TurnTokens, token_pattern
from nemo_opd.alignment.templates import TemplateFailure, apply_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RoleOverrides = Mapping[str, str | Sequence[str]]
"""Token content → its role, or roles in order of importance. Without roles, the token is never paired."""

_NAMED_BY_TOKENIZER = ("eos", "bos", "cls", "sep", "mask", "pad", "unk")
_ENDS_A_TURN = {"end_of_turn", "end_of_message", "eos"}
_LAST_RESORT = ("pad", "unk")
"""Roles that count only if an id has no other: pad and unk are often borrowed from eos."""
_GENERATION_CONFIG = "generation_config.json"

_QUESTION, _ANSWER, _NEXT = "FirstQuestion", "FirstAnswer", "SecondQuestion"
_PROBE_MESSAGES = [
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _NEXT},
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoleRow:
    id: int
    content: str
    roles: tuple[str, ...]
    """The most important first."""
    reserved: bool
    """Whether its vocabulary reserves it: paired only within one tokenizer, or if an override gives it a role."""


@dataclass(frozen=True, slots=True)
class _GenerationIds:
    bos: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    """All ids that end a generation: often the ends of a turn, a message and a text."""
    pad: tuple[int, ...] = ()


def roles_of(tokenizer: PreTrainedTokenizerBase, overrides: RoleOverrides | None = None) -> dict[int, tuple[str, ...]]:
    """Map ids to roles, the most important first, for special tokens and for added tokens with a known meaning.

    The order is: eos if the id is the tokenizer's eos; roles by content or chat template; the tokenizer's other names
    for the id; the generation config's. A special token without a known meaning has its own content as its role. An
    override applies to tokens with its content in either tokenizer.
    """
    named, template, ids = _named_ids(tokenizer), template_roles(tokenizer), _generation_ids(tokenizer)
    roles: dict[int, tuple[str, ...]] = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        id_roles = ["eos"] if named.get("eos") == token_id else []
        content_roles = _known_roles(token.content, token.special)
        id_roles += content_roles or ([template[token.content]] if token.content in template else [])
        if token.special:
            if named.get("eos") == token_id and _template_writes(tokenizer, token.content):
                id_roles.append("end_of_turn")
            id_roles += [role for role, named_id in named.items() if named_id == token_id]
            generation = (("eos", ids.eos), ("bos", ids.bos), ("pad", ids.pad))
            id_roles += [role for role, role_ids in generation if token_id in role_ids]
        if not id_roles and token.special:
            id_roles.append(token.content)
        if id_roles:
            distinct = tuple(dict.fromkeys(id_roles))
            roles[token_id] = tuple(role for role in distinct if role not in _LAST_RESORT) or distinct
    vocab = tokenizer.get_vocab() if overrides else {}
    return roles | {
        vocab[content]: (names,) if isinstance(names, str) else tuple(names)
        for content, names in (overrides or {}).items()
        if content in vocab
    }


def role_table(tokenizer: PreTrainedTokenizerBase, overrides: RoleOverrides | None = None) -> list[RoleRow]:
    """List all tokens with a role, ordered by id."""
    rows = []
    for token_id, roles in sorted(roles_of(tokenizer, overrides).items()):
        content = tokenizer.convert_ids_to_tokens(token_id)
        assert isinstance(content, str)
        rows.append(RoleRow(token_id, content, roles, roles == (content,) and is_reserved(content)))
    return rows


def turn_end_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids whose role is to end a turn, a message or a sequence."""
    return frozenset(i for i, roles in roles_of(tokenizer).items() if _ENDS_A_TURN & set(roles))


def _named_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids that the tokenizer names as role → id: `eos_token` as `eos`. Other names remain contents."""
    named = {}
    for role in _NAMED_BY_TOKENIZER:
        content = tokenizer.special_tokens_map.get(f"{role}_token")
        token_id = tokenizer.convert_tokens_to_ids(str(content)) if content is not None else None
        if isinstance(token_id, int):
            named[role] = token_id
    return named


def _template_writes(tokenizer: PreTrainedTokenizerBase, content: str) -> bool:
    """Return whether the chat template writes eos, and so ends its turns with it."""
    template = tokenizer.chat_template or ""
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    return content in text or "eos_token" in text


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a sampled sequence: the tokenizer's EOS, its generation config's, and the token that
    ends a turn in the chat template.
    """
    turn_ends = [content for content, role in template_roles(tokenizer).items() if role == "end_of_turn"]
    ends = [*_generation_ids(tokenizer).eos, tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, turn_ends)]
    return frozenset(token_id for token_id in ends if isinstance(token_id, int))


def template_roles(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Map special tokens to end_of_turn, start_of_turn or end_of_header; return an empty map if no template renders.

    In `<|a|>user<|b|>…<|z|>` a turn starts with a, its header ends with b, and z, which is in no header, ends the turn.
    """
    text = _render_probe(tokenizer, 3)
    first, answer, second = (text.find(word) for word in (_QUESTION, _ANSWER, _NEXT))
    if not 0 <= first < answer < second:
        return {}
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    specials = token_pattern(added.values())
    stops = [added.get(i, "") for i in (tokenizer.eos_token_id, *_generation_ids(tokenizer).eos)]
    tokens = TurnTokens.of(added.values(), stops)
    between, last = text[answer + len(_ANSWER) : second], _render_probe(tokenizer, 2).partition(_ANSWER)[2]
    header = specials.findall(text[:first])
    closing = between[: tokens.shared(between, last)]
    roles: dict[str, str] = {}
    if specials.search(closing):
        end = tokens.end(closing)[1]
    else:
        # If more messages follow, the template closes the turn with another token, or not at all.
        end = tokens.end(last)[1]
        match = specials.match(between.lstrip())
        if end and match and match.group() not in header:
            closing, between = match.group(), between.lstrip()
            roles[closing] = "end_of_message"
    if end:
        roles[end] = "end_of_turn"
    # The next turn's opening splits into text, start, role name, then the message, or the header's end and message.
    opening = specials.split(between[len(closing) :])
    if len(opening) >= 3 and opening[1] in header and opening[2].strip():
        roles[opening[1]] = "start_of_turn"
        if len(opening) == 5 and not opening[4].strip():
            roles[opening[3]] = "end_of_header"
    return roles


def _render_probe(tokenizer: PreTrainedTokenizerBase, num_messages: int) -> str:
    """Render the beginning of a plain conversation; return "" without a template or if it rejects the conversation."""
    if not tokenizer.chat_template:
        return ""
    try:
        return apply_template(tokenizer, _PROBE_MESSAGES[:num_messages])
    except TemplateFailure as error:
        _log.debug("the chat template does not render a plain conversation: %s", error)
        return ""


def _generation_ids(tokenizer: PreTrainedTokenizerBase) -> _GenerationIds:
    """Read ids from the file next to the tokenizer's, or in the local cache of a hub model; never from the network.

    Return no ids without such a file. A file that cannot be read is ignored, with a warning.
    """
    file = _generation_config_file(str(getattr(tokenizer, "name_or_path", "") or ""))
    if file is None:
        return _GenerationIds()
    status = file.stat()
    return _read_generation_ids(file, status.st_mtime_ns, status.st_size)


def _generation_config_file(name: str) -> Path | None:
    if not name:
        return None
    if Path(name).is_dir():
        file = Path(name) / _GENERATION_CONFIG
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, _GENERATION_CONFIG)
    except HFValidationError:  # not a folder, and not a possible name on the hub
        return None
    return Path(cached) if isinstance(cached, str) else None


@lru_cache(maxsize=32)
def _read_generation_ids(file: Path, _mtime_ns: int, _size: int) -> _GenerationIds:
    """Read a file. Cached by the file's state, so that a broken one causes a single warning."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return _GenerationIds(**{role: _parse_ids(data.get(f"{role}_token_id")) for role in ("bos", "eos", "pad")})
    except (OSError, ValueError, AttributeError, TypeError) as error:
        _log.warning("the special tokens that %s names are ignored, because it cannot be read: %s", file, error)
        return _GenerationIds()


def _parse_ids(value: object) -> tuple[int, ...]:
    """Parse an id, a list of ids or None. Raises TypeError for anything else."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise TypeError(f"a token id is an integer, not {value!r}")
    return tuple(ids)


_SPECIAL_CONTENTS: dict[str, tuple[str, ...]] = {
    "end_of_turn": (
        "<|im_end|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<turn|>",
        "<|eot|>",
        "<|end|>",
        "<|return|>",
        "<|END_OF_TURN_TOKEN|>",
        "[|endofturn|]",
    ),
    "end_of_message": ("<|eom_id|>", "<|eom|>", "<|call|>"),
    "end_of_text": (
        "<|endoftext|>",
        "<|end_of_text|>",
        "<eos>",
        "</s>",
        "<｜end▁of▁sentence｜>",
        "[EOS]",
        "<EOS_TOKEN>",
    ),
    "bos": (
        "<|begin_of_text|>",
        "<bos>",
        "<s>",
        "<|startoftext|>",
        "<｜begin▁of▁sentence｜>",
        "[BOS]",
        "<BOS_TOKEN>",
    ),
    "start_of_turn": (
        "<|im_start|>",
        "<|start_header_id|>",
        "<start_of_turn>",
        "<|turn>",
        "<|header_start|>",
        "<|start|>",
        "<|start_of_role|>",
        "<|START_OF_TURN_TOKEN|>",
    ),
    "end_of_header": (
        "<|end_header_id|>",
        "<|header_end|>",
        "<|message|>",
        "<|im_middle|>",
        "<|im_sep|>",
        "<|end_of_role|>",
    ),
    "channel": ("<|channel|>", "<|channel>"),
    "end_of_channel": ("<channel|>",),
    "pad": ("<pad>", "<|pad|>", "<|finetune_right_pad_id|>", "<|finetune_right_pad|>", "<｜▁pad▁｜>", "[PAD]", "<PAD>"),
    "unk": ("<unk>", "[UNK]", "<UNK>"),
    "mask": ("<mask>", "[MASK]"),
}
"""Role → contents of tokens marked special. If not marked, they may be text: `</s>` is also an HTML tag."""
_MARK_CONTENTS: dict[str, tuple[str, ...]] = {
    "user_turn": ("<|user|>", "<｜User｜>", "<|im_user|>", "<|USER_TOKEN|>", "[|user|]", "[INST]"),
    "assistant_turn": (
        "<|assistant|>",
        "<｜Assistant｜>",
        "<|im_assistant|>",
        "<|CHATBOT_TOKEN|>",
        "[|assistant|]",
        "[/INST]",
    ),
    "system_turn": ("<|system|>", "<|im_system|>", "<|SYSTEM_TOKEN|>", "[|system|]", "[SYSTEM_PROMPT]"),
    "end_of_system_turn": ("[/SYSTEM_PROMPT]",),
    "tool_turn": ("<|observation|>",),
    "think_start": ("<think>", "<|begin_of_thought|>", "[THINK]"),
    "think_end": ("</think>", "<|end_of_thought|>", "[/THINK]"),
    "python_tag": ("<|python_tag|>", "<|python_start|>"),
    "end_of_python": ("<|python_end|>",),
    "tools_start": ("<tools>", "<|tool|>", "<|tool>", "[AVAILABLE_TOOLS]"),
    "tools_end": ("</tools>", "<|/tool|>", "<tool|>", "[/AVAILABLE_TOOLS]"),
    "tool_calls_start": ("<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>"),
    "tool_calls_end": ("<|tool_calls_section_end|>", "<｜tool▁calls▁end｜>"),
    "tool_call_start": (
        "<tool_call>",
        "<|tool_call|>",
        "<|tool_call>",
        "<|tool_call_begin|>",
        "<｜tool▁call▁begin｜>",
        "[TOOL_CALLS]",
    ),
    "tool_call_end": ("</tool_call>", "<|/tool_call|>", "<tool_call|>", "<|tool_call_end|>", "<｜tool▁call▁end｜>"),
    "tool_arguments": ("<|tool_call_argument_begin|>", "<｜tool▁sep｜>", "[ARGS]"),
    "tool_response_start": (
        "<tool_response>",
        "<|tool_response|>",
        "<|tool_response>",
        "<｜tool▁output▁begin｜>",
        "[TOOL_RESULTS]",
    ),
    "tool_response_end": (
        "</tool_response>",
        "<|/tool_response|>",
        "<tool_response|>",
        "<｜tool▁output▁end｜>",
        "[/TOOL_RESULTS]",
    ),
    "fim_prefix": ("<|fim_prefix|>", "<fim_prefix>", "<｜fim▁begin｜>", "<|code_prefix|>", "[PREFIX]"),
    "fim_suffix": ("<|fim_suffix|>", "<fim_suffix>", "<｜fim▁hole｜>", "<|code_suffix|>", "[SUFFIX]"),
    "fim_middle": ("<|fim_middle|>", "<fim_middle>", "<｜fim▁end｜>", "<|code_middle|>", "[MIDDLE]"),
}
"""Role → contents of added tokens, which only some tokenizers mark special."""
_FALLBACK_ROLES: dict[str, tuple[str, ...]] = {"end_of_message": ("end_of_turn",)}
"""Roles that a role can stand for if the other side has nothing closer: a message may end before its turn."""

_MARK_ROLES = {content: role for role, contents in _MARK_CONTENTS.items() for content in contents}
_SPECIAL_ROLES = {content: role for role, contents in _SPECIAL_CONTENTS.items() for content in contents}


def _known_roles(content: str, special: bool) -> tuple[str, ...]:
    """Return an added token's roles by its content, the most important first; empty if the content is unknown."""
    role = _MARK_ROLES.get(content) or (_SPECIAL_ROLES.get(content) if special else None)
    return (role, *_FALLBACK_ROLES.get(role, ())) if role else ()


_RESERVED = re.compile(
    r"[<\[][|｜]?_?(?:reserved|unused|extra|dummy|place.?holder|special|control|madeupword)\D*\d+[|｜]?_?[>\]]",
    re.IGNORECASE,
)


def is_reserved(content: str) -> bool:
    """Return whether a token is numbered and reserved, such as `<unused7>`: each model may use it differently."""
    return _RESERVED.fullmatch(content) is not None
