"""A chat template and its forms of contents and calls, as public templates differ in these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nemo_opd.alignment.chat_messages import MARKS, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]] | None

_WORD = "probeword"
_NONES = ("None", "null")
"""None as templates print it, and as JSON."""
_ARGUMENTS = {"probekey": "probevalue"}
_QUESTION: Message = {"role": "user", "content": "?"}
_ID = "probe0001"
"""Letters and digits, nine as Mistral's templates require."""


class ChatTemplate:
    """A renderer of plain messages with a tokenizer's chat template. Picklable.

    Contents are passed as text parts if the template writes no other form, None is passed instead of an empty content
    if the template writes the two differently, and arguments of calls are passed as JSON text if it does not write
    objects as JSON.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._reads_none: dict[tuple[str, bool], bool] = {}
        """Keyed by role and whether the message has calls."""

    def render(self, messages: Sequence[Message], tools: Tools = None, *, add_generation_prompt: bool = False) -> str:
        """Render messages from `plain_messages`. Raises any exception: a template is a program."""
        adapted = [self._adapted(message) for message in messages]
        try:
            return self._render(adapted, tools, add_generation_prompt)
        except Exception:
            if all(message.get("content") is not None for message in adapted):
                raise
        return self._render([_with_content(message) for message in adapted], tools, add_generation_prompt)

    def render_or_none(
        self, messages: Sequence[Message], tools: Tools = None, *, add_generation_prompt: bool = False
    ) -> str | None:
        """Render messages as `render` does, or return None if the template rejects them."""
        try:
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except Exception:
            return None

    def _adapted(self, message: Message) -> Message:
        """Convert a message to the form that the template reads."""
        calls = message.get("tool_calls") or ()
        adapted = {key: value for key, value in message.items() if key not in MARKS}
        if self._reads_only_parts:
            adapted["content"] = _parts(message.get("content"))
        elif message.get("content") is None and not self._is_none_read(message["role"], bool(calls)):
            adapted["content"] = ""
        if calls and self._reads_arguments_as_text:
            adapted["tool_calls"] = [_with_json_arguments(call) for call in calls]
        return adapted

    @cached_property
    def _reads_only_parts(self) -> bool:
        texts: list[Message] = [{"role": role, "content": _WORD} for role in ("user", "assistant")]
        parts = [{**message, "content": _parts(_WORD)} for message in texts]
        return _WORD not in self._probe(texts) and _WORD in self._probe(parts)

    @cached_property
    def _reads_arguments_as_text(self) -> bool:
        """Whether the template prints arguments unchanged, which would turn an object into Python syntax."""
        text = json.dumps(_ARGUMENTS)
        for content in (None, ""):
            as_text, as_object = (self._probe([_QUESTION, _calling(content, form)]) for form in (text, _ARGUMENTS))
            if text in as_text:
                return not as_object or str(_ARGUMENTS) in as_object
        return False

    def _is_none_read(self, role: str, has_calls: bool) -> bool:
        """Return whether the template writes a message without content differently from one with an empty content.

        A template that prints the None itself does so by accident.
        """
        kind = role, has_calls
        if kind not in self._reads_none:
            arguments = json.dumps(_ARGUMENTS) if self._reads_arguments_as_text else _ARGUMENTS
            conversations = (_probe_conversation(role, content, arguments, has_calls) for content in (None, ""))
            as_none, as_empty = map(self._probe, conversations)
            is_written = any(as_none.count(none) > as_empty.count(none) for none in _NONES)
            self._reads_none[kind] = as_none not in ("", as_empty) and not is_written
        return self._reads_none[kind]

    def _probe(self, messages: Sequence[Message]) -> str:
        """Render messages, or return "" if the template rejects them."""
        try:
            return self._render(messages, None, add_generation_prompt=False)
        except Exception:
            return ""

    def _render(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool) -> str:
        conversation = [dict(message) for message in messages]
        settings: dict[str, Any] = {
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            **self._template_kwargs,
        }
        if all(message.get("content") is not None for message in conversation):
            return str(self._tokenizer.apply_chat_template(conversation, tokenize=False, **settings))
        # The tokenizer's method drops keys that are None. Imported here since the import takes a second.
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(None, settings["tools"])
        settings = {**self._tokenizer.special_tokens_map, **settings}
        texts = render_jinja_template([conversation], chat_template=template, **settings)[0]
        return str(texts[0])


def _parts(content: str | None) -> list[dict[str, str]]:
    return [{"type": "text", "text": content or ""}]


def _with_content(message: Message) -> Message:
    return {**message, "content": ""} if message.get("content") is None else message


def _probe_conversation(role: str, content: str | None, arguments: Any, has_calls: bool) -> list[Message]:
    """Return a conversation with a message of a role, and the messages it needs around it."""
    message = {"role": role, "content": content}
    if role == "user":
        return [message]
    if role == "assistant":
        return [_QUESTION, _calling(content, arguments) if has_calls else message]
    if role in ("system", "developer"):
        return [message, _QUESTION]
    return [_QUESTION, _calling("", arguments), {**message, "name": _WORD, "tool_call_id": _ID}]


def _calling(content: str | None, arguments: Any) -> Message:
    call = {"id": _ID, "type": "function", "function": {"name": _WORD, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _with_json_arguments(call: Message) -> Message:
    """Return a call with its arguments as JSON text."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_json_arguments(call["function"])}
    arguments = call.get("arguments")
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)} if isinstance(arguments, Mapping) else call
