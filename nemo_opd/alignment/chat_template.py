"""A chat template and its forms of contents and calls, as public templates differ in these, and the plain form of
messages.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from nemo_opd.alignment.templates import TemplateFailure, apply_template
from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_opd.config.data import LearnedTurns

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

THINKING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which a message stores its author's thoughts before the content."""

MARKS = ("weight", "train", "training", "loss_mask")
"""Keys that tell whether a message is learned."""

_MEDIA = ("image", "video", "audio")
"""Words in the types of parts that are not text, such as `image_url`."""

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Roles of messages with `from` and `value`."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PROBE_WORD = "probeword"
_SPELLINGS_OF_NONE = ("None", "null")
"""None as templates print it, and as JSON."""
_PROBE_ARGUMENTS = {"probekey": "probevalue"}
_PROBE_QUESTION: Message = {"role": "user", "content": "?"}
_PROBE_ID = "probe0001"
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
        """Render messages from `plain_messages`.

        Raises TemplateFailure if the template refuses them, and AlignmentError if it needs too much time or memory.
        """
        adapted = [self._adapted(message) for message in messages]
        try:
            return self._render(adapted, tools, add_generation_prompt)
        except TemplateFailure:
            if all(message.get("content") is not None for message in adapted):
                raise
        with_contents = [{**message, "content": message.get("content") or ""} for message in adapted]
        return self._render(with_contents, tools, add_generation_prompt)

    def render_or_none(
        self, messages: Sequence[Message], tools: Tools = None, *, add_generation_prompt: bool = False
    ) -> str | None:
        """Render messages as `render` does, or return None if the template refuses them. Raises AlignmentError."""
        try:
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except TemplateFailure:
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
        texts: list[Message] = [{"role": role, "content": _PROBE_WORD} for role in ("user", "assistant")]
        parts = [{**message, "content": _parts(_PROBE_WORD)} for message in texts]
        return _PROBE_WORD not in self._probe(texts) and _PROBE_WORD in self._probe(parts)

    @cached_property
    def _reads_arguments_as_text(self) -> bool:
        """Whether the template prints arguments unchanged, which would turn an object into Python syntax."""
        text = json.dumps(_PROBE_ARGUMENTS)
        for content in (None, ""):
            as_text, as_object = (
                self._probe([_PROBE_QUESTION, _calling(content, form)]) for form in (text, _PROBE_ARGUMENTS)
            )
            if text in as_text:
                return not as_object or str(_PROBE_ARGUMENTS) in as_object
        return False

    def _is_none_read(self, role: str, has_calls: bool) -> bool:
        """Return whether the template writes a message without content differently from one with an empty content.

        A template that prints the None itself does so by accident.
        """
        kind = role, has_calls
        if kind not in self._reads_none:
            arguments = json.dumps(_PROBE_ARGUMENTS) if self._reads_arguments_as_text else _PROBE_ARGUMENTS
            conversations = (_probe_conversation(role, content, arguments, has_calls) for content in (None, ""))
            as_none, as_empty = map(self._probe, conversations)
            is_written = any(as_none.count(none) > as_empty.count(none) for none in _SPELLINGS_OF_NONE)
            self._reads_none[kind] = as_none not in ("", as_empty) and not is_written
        return self._reads_none[kind]

    def _probe(self, messages: Sequence[Message]) -> str:
        """Render messages, or return "" if the template refuses them. Raises AlignmentError as `render` does."""
        try:
            return self._render(messages, None, add_generation_prompt=False)
        except TemplateFailure:
            return ""

    def _render(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool) -> str:
        conversation = [dict(message) for message in messages]
        settings: dict[str, Any] = {
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            **self._template_kwargs,
        }
        return apply_template(self._tokenizer, conversation, **settings)


def _parts(content: str | None) -> list[dict[str, str]]:
    return [{"type": "text", "text": content or ""}]


def _probe_conversation(role: str, content: str | None, arguments: Any, has_calls: bool) -> list[Message]:
    """Return a conversation with a message of a role, and the messages it needs around it."""
    message = {"role": role, "content": content}
    if role == "user":
        return [message]
    if role == "assistant":
        return [_PROBE_QUESTION, _calling(content, arguments) if has_calls else message]
    if role in ("system", "developer"):
        return [message, _PROBE_QUESTION]
    return [_PROBE_QUESTION, _calling("", arguments), {**message, "name": _PROBE_WORD, "tool_call_id": _PROBE_ID}]


def _calling(content: str | None, arguments: Any) -> Message:
    call = {"id": _PROBE_ID, "type": "function", "function": {"name": _PROBE_WORD, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _with_json_arguments(call: Message) -> Message:
    """Return a call with its arguments as JSON text."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_json_arguments(call["function"])}
    arguments = call.get("arguments")
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)} if isinstance(arguments, Mapping) else call


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages in one form, which `ChatTemplate` adapts to a template.

    Contents are strings, or None; a list of text parts is joined. A call's arguments that are JSON text of an object
    become that object; other texts stay. Null keys of messages, calls and functions are dropped. ShareGPT's `from` and
    `value` become role and content.

    Raises AlignmentError for an empty list, and for anything but mappings with a role and such contents and calls.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise AlignmentError(
            f"a conversation must be a list of messages such as {{'role': 'user', 'content': 'Hi'}}, "
            f"not {type(messages).__name__}"
        )
    if not messages:
        raise AlignmentError("a conversation without messages cannot be rendered; drop it from the data")
    return [_plain_message(k, message) for k, message in enumerate(messages)]


def _plain_message(k: int, message: Message) -> dict[str, Any]:
    if isinstance(message, Mapping) and message.get("role") is None and "from" in message:
        message = _from_sharegpt(k, message)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise AlignmentError(
            f"messages[{k}] is {_shorten(message)}, which is not a mapping with a role; write for example "
            "{'role': 'user', 'content': 'Hi'}"
        )
    role = message["role"]
    if role not in _ROLES and (meant := _misspelt(role)):
        raise AlignmentError(f"messages[{k}] has the role {role!r}; write {meant!r}")
    plain = {**_without_nulls(message), "content": _plain_content(k, message.get("content"))}
    if calls := plain.get("tool_calls"):
        if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
            raise AlignmentError(
                f"messages[{k}].tool_calls is {_shorten(calls)}; it must be a list of calls such as "
                "{'type': 'function', 'function': {'name': 'weather', 'arguments': {'city': 'Bern'}}}"
            )
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    if isinstance(call := plain.get("function_call"), Mapping):
        plain["function_call"] = _plain_call(call)
    return plain


@cache
def _misspelt(role: str) -> str | None:
    """Return the role that is meant by another spelling, or by ShareGPT's name for user or assistant.

    Other roles, such as `observation` or `ipython`, are a template's own.
    """
    lower = role.lower()
    if (meant := _SHAREGPT_ROLES.get(lower)) in ("user", "assistant"):
        return meant
    return next(iter(difflib.get_close_matches(lower, _ROLES, n=1, cutoff=0.8)), None)


def _from_sharegpt(k: int, message: Message) -> dict[str, Any]:
    other_keys = {key: value for key, value in message.items() if key not in ("from", "value", "role", "content")}
    role = _SHAREGPT_ROLES.get(message["from"]) if isinstance(message["from"], str) else None
    if role is None:
        raise AlignmentError(
            f"messages[{k}] is from {_shorten(message['from'])}; write one of {', '.join(_SHAREGPT_ROLES)}"
        )
    return {"role": role, "content": message.get("value"), **other_keys}


def _plain_call(call: Message) -> dict[str, Any]:
    plain = _without_nulls(call)
    if isinstance(function := plain.get("function"), Mapping):
        plain["function"] = _plain_call(function)
    if isinstance(arguments := plain.get("arguments"), str):
        plain["arguments"] = _object_or_text(arguments)
    return plain


def _object_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair has no tokens
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _plain_content(k: int, content: object) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        types = [str(part.get("type")) for part in content if isinstance(part, Mapping)]
        if media := next((name for name in types if any(kind in name for kind in _MEDIA)), None):
            raise AlignmentError(
                f"messages[{k}].content has a part of type {media!r}, but models read only the text of conversations; "
                "leave the row out, or that part if the text makes sense without it"
            )
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(map(str, parts))
    raise AlignmentError(
        f"messages[{k}].content is {_shorten(content)}; it must be a string, None or a list of text parts such as "
        "{'type': 'text', 'text': 'Hi'} (write a tool's result as JSON text)"
    )


def content_text(message: Message) -> str:
    """Return the content of a plain message, or an empty string."""
    return message["content"] or ""


def learned_messages(messages: Sequence[Message], turns: LearnedTurns = "all") -> list[bool]:
    """Return, for each plain message, whether it is learned: an assistant message that `data.learned_turns` selects.

    Raises AlignmentError for a mark other than 0 or 1.
    """
    marks = [_mark(k, message) for k, message in enumerate(messages)]
    user_turns = [k for k, message in enumerate(messages) if message["role"] == "user"]
    first_learned = user_turns[-1] if user_turns and turns == "last" else 0
    return [
        message["role"] == "assistant"
        and k >= first_learned
        and (mark is True if turns == "marked" else mark is not False)
        for k, (message, mark) in enumerate(zip(messages, marks, strict=True))
    ]


def _mark(k: int, message: Message) -> bool | None:
    """Return whether a message is marked as learned, or None without a mark."""
    marks = {key: message[key] for key in MARKS if message.get(key) is not None}
    for key, mark in marks.items():
        if not isinstance(mark, int | float) or mark not in (0, 1):
            raise AlignmentError(
                f"messages[{k}].{key} is {_shorten(mark)}; it must be 1 or true for a message that is learned, 0 or "
                "false for one that is not"
            )
    return all(marks.values()) if marks else None


def message_texts(message: Message) -> tuple[str, ...]:
    """Return the texts that the author of a plain message wrote: content, thoughts, and names of called functions."""
    functions = [call.get("function") for call in message.get("tool_calls") or ()]
    calls = [function for function in functions if isinstance(function, Mapping)]
    # Some files repeat a thought under several keys, and a template reads one of them.
    thoughts = dict.fromkeys(text for text in map(message.get, THINKING) if isinstance(text, str))
    written = [message["content"], *thoughts, *(call.get("name") for call in calls)]
    return tuple(text for text in written if isinstance(text, str) and text)


def _shorten(value: object) -> str:
    written = repr(value)
    return written if len(written) <= 80 else written[:77] + "..."
