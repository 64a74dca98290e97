"""Roles of the special tokens of published models (methods.md §1.4)."""

from __future__ import annotations

import re

_SPECIAL: dict[str, tuple[str, ...]] = {
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
_MARKS: dict[str, tuple[str, ...]] = {
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
_RESERVED = re.compile(
    r"[<\[][|｜]?_?(?:reserved|unused|extra|dummy|place.?holder|special|control|madeupword)\D*\d+[|｜]?_?[>\]]",
    re.IGNORECASE,
)

_MARK_ROLES = {content: role for role, contents in _MARKS.items() for content in contents}
_SPECIAL_ROLES = {content: role for role, contents in _SPECIAL.items() for content in contents}


def known_roles(content: str, special: bool) -> tuple[str, ...]:
    """Return an added token's roles by its content, the most important first; empty if the content is unknown."""
    role = _MARK_ROLES.get(content) or (_SPECIAL_ROLES.get(content) if special else None)
    return (role, *_FALLBACK_ROLES.get(role, ())) if role else ()


def is_reserved(content: str) -> bool:
    """Return whether a token is numbered and reserved, such as `<unused7>`: each model may use it differently."""
    return _RESERVED.fullmatch(content) is not None
