"""Roles of special tokens by their place in a conversation that the chat template renders."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nemo_opd.alignment.chat_turns import TurnTokens, token_pattern
from nemo_opd.alignment.generation_config import generation_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_QUESTION, _ANSWER, _NEXT = "FirstQuestion", "FirstAnswer", "SecondQuestion"
_MESSAGES = [
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _NEXT},
]


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a sampled sequence: the tokenizer's EOS, its generation config's, and the token that
    ends a turn in the chat template.
    """
    turn_ends = [content for content, role in template_roles(tokenizer).items() if role == "end_of_turn"]
    ends = [*generation_ids(tokenizer).eos, tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, turn_ends)]
    return frozenset(token_id for token_id in ends if isinstance(token_id, int))


def template_roles(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Map special tokens to end_of_turn, start_of_turn or end_of_header; return an empty map if no template renders.

    In `<|a|>user<|b|>…<|z|>` a turn starts with a, its header ends with b, and z, which is in no header, ends the turn.
    """
    text = _render(tokenizer, 3)
    first, answer, second = (text.find(word) for word in (_QUESTION, _ANSWER, _NEXT))
    if not 0 <= first < answer < second:
        return {}
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    specials = token_pattern(added.values())
    stops = [added.get(i, "") for i in (tokenizer.eos_token_id, *generation_ids(tokenizer).eos)]
    tokens = TurnTokens.of(added.values(), stops)
    between, last = text[answer + len(_ANSWER) : second], _render(tokenizer, 2).partition(_ANSWER)[2]
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


def _render(tokenizer: PreTrainedTokenizerBase, num_messages: int) -> str:
    """Render the beginning of a plain conversation; return "" without a template or if it rejects the conversation."""
    if not tokenizer.chat_template:
        return ""
    try:
        return str(tokenizer.apply_chat_template(_MESSAGES[:num_messages], tokenize=False))
    except Exception as error:  # a template is someone else's program and may raise anything
        logger.debug("the chat template does not render a plain conversation: %s", error)
        return ""
