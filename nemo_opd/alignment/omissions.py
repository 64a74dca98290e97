"""Pieces of a conversation that a chat template leaves out, and opening tags that only its generation prompt writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Literal, get_args

from nemo_opd.alignment.chat_messages import THINKING, Message
from nemo_opd.alignment.chat_template import ChatTemplate, Tools

Piece = Literal[
    "tool calls",
    "what the assistant says",
    "what the assistant says beside a call",
    "the reasoning of the last message",
    "tools' results",
    "system messages",
    "what the user says",
]
"""Piece of a message."""
PIECES: tuple[Piece, ...] = get_args(Piece)

_OPENING_TAG = re.compile(r"(<[^<>/]*(?:think|reason|thought)[^<>/]*>|\[THINK\])\s*\Z", re.IGNORECASE)


def omitted_pieces(template: ChatTemplate, messages: Sequence[Message], tools: Tools = None) -> list[set[Piece]]:
    """Return the pieces of each plain message that the template leaves out.

    Each piece is replaced by words that occur nowhere else, which are then looked up. Takes one rendering, or one per
    message if the template rejects the words. Reasoning is checked only in a last assistant message: many templates
    drop earlier reasoning on purpose.
    """
    marked = [_WordMessage(k, message, k == len(messages) - 1) for k, message in enumerate(messages)]
    rendered = template.render_or_none([worded.message for worded in marked], tools)
    if rendered is not None:
        return [worded.missing(rendered) for worded in marked]
    omitted: list[set[Piece]] = []
    for k, worded in enumerate(marked):
        alone = template.render_or_none([*messages[:k], worded.message, *messages[k + 1 :]], tools)
        omitted.append(set() if alone is None else worded.missing(alone))
    return omitted


def missing_opening_tag(template: ChatTemplate, messages: Sequence[Message], tools: Tools = None) -> str | None:
    """Return the thinking tag that ends the generation prompt, if the assistant's last turn lacks it."""
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        return None
    prompt = template.render_or_none(messages[:-1], tools, add_generation_prompt=True)
    text = template.render_or_none(messages, tools)
    tag = None if prompt is None else _OPENING_TAG.search(prompt)
    if prompt is None or text is None or tag is None or text.startswith(prompt[: tag.end(1)]):
        return None
    return tag.group(1)


class _WordMessage:
    """A message whose pieces are replaced by unique words."""

    def __init__(self, k: int, message: Message, is_last: bool) -> None:
        self._words = (f"zq{k:05}x{i:03}qz" for i in count())
        self._words_of: dict[Piece, list[str]] = {}
        self.message = dict(message)
        calls = message.get("tool_calls") or ()
        if (message.get("content") or "").strip():
            self.message["content"] = self._word(_piece(message["role"], bool(calls)))
        if calls:
            self.message["tool_calls"] = [self._call(call) for call in calls]
        # Keys of OpenAI's API that few templates read.
        if isinstance(message.get("function_call"), Mapping):
            self.message["function_call"] = self._call(message["function_call"])
        if isinstance(refusal := message.get("refusal"), str) and refusal.strip():
            self.message["refusal"] = self._word("what the assistant says")
        thoughts = [key for key in THINKING if isinstance(message.get(key), str) and message[key].strip()]
        if thoughts and is_last and message["role"] == "assistant":
            # Some files repeat a thought under several keys, and a template reads one of them.
            self.message |= dict.fromkeys(thoughts, self._word("the reasoning of the last message"))

    def missing(self, rendered: str) -> set[Piece]:
        """Return the pieces with a word that the rendering lacks."""
        return {piece for piece, words in self._words_of.items() if any(word not in rendered for word in words)}

    def _word(self, piece: Piece) -> str:
        word = next(self._words)
        self._words_of.setdefault(piece, []).append(word)
        return word

    def _call(self, call: Message) -> Message:
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(call["function"])}
        marked = {**call, "name": self._word("tool calls")}
        if isinstance(arguments := call.get("arguments"), Mapping):
            marked["arguments"] = {key: self._value(value) for key, value in arguments.items()}
        return marked

    def _value(self, value: Any) -> Any:
        return self._word("tool calls") if isinstance(value, str) else value


def _piece(role: str, has_calls: bool) -> Piece:
    if role == "assistant":
        return "what the assistant says beside a call" if has_calls else "what the assistant says"
    if role == "user":
        return "what the user says"
    return "system messages" if role in ("system", "developer") else "tools' results"
