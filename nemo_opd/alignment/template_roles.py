"""Roles of special tokens by their place in a conversation that the chat template renders."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_QUESTION, _ANSWER, _NEXT = "FirstQuestion", "FirstAnswer", "SecondQuestion"


def template_roles(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Map special tokens to end_of_turn, start_of_turn or end_of_header; to nothing where no template renders.

    In `<|a|>user<|b|>…<|z|>` a turn starts with a, its header ends with b, and z, which no header holds, ends the turn.
    """
    text = _rendered(tokenizer)
    first, answer, second = (text.find(word) for word in (_QUESTION, _ANSWER, _NEXT))
    if not 0 <= first < answer < second:
        return {}
    specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]
    header = _split(text[:first], specials)[1::2]
    between = _split(text[answer + len(_ANSWER) : second], specials)
    roles: dict[str, str] = {}
    if len(between) > 1 and not between[0].strip() and between[1] not in header:
        roles[between[1]] = "end_of_turn"
        between = between[2:]
    # What is left reads: text, start, the role's name, then either the message or the header's end and the message.
    if len(between) >= 3 and between[1] in header and between[2].strip():
        roles[between[1]] = "start_of_turn"
        if len(between) == 5 and not between[4].strip():
            roles[between[3]] = "end_of_header"
    return roles


def _rendered(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        return ""
    conversation = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _NEXT},
    ]
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False))
    except Exception as error:  # a template is a foreign program, which may raise anything
        logger.debug("the chat template does not render a plain conversation: %s", error)
        return ""


def _split(text: str, specials: Iterable[str]) -> list[str]:
    """Split into text and special tokens in turn: text, token, text, …, text."""
    longest_first = sorted(specials, key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if longest_first else [text]
