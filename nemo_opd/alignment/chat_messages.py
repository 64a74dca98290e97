"""Plain form of a conversation's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_opd.config.data import LearnedTurns
from nemo_opd.errors import AlignmentError

Message = Mapping[str, Any]

THINKING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which a message stores its author's thoughts before the content."""

MARKS = ("weight", "train", "training", "loss_mask")
"""Keys that tell whether a message is learned."""

_MEDIA = ("image", "video", "audio")
"""Words in the types of parts that are not text, such as `image_url`."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages in one form, which `ChatTemplate` adapts to a template.

    Contents are strings, or None; a list of text parts is joined. A call's arguments that are JSON text of an object
    become that object; other texts stay. Null keys of messages, calls and functions are dropped.

    Raises AlignmentError for an empty list, and for anything but mappings with a role and such contents and calls.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise AlignmentError(
            f"a conversation must be a list of messages such as {{'role': 'user', 'content': 'Hi'}}, "
            f"not {type(messages).__name__}"
        )
    if not messages:
        raise AlignmentError("a conversation without messages cannot be rendered; drop it from the data")
    return [_plain(k, message) for k, message in enumerate(messages)]


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


def _plain(k: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise AlignmentError(
            f"messages[{k}] is {_shorten(message)}, which is not a mapping with a role; write for example "
            "{'role': 'user', 'content': 'Hi'}"
        )
    plain = {**_without_nulls(message), "content": _text(k, message.get("content"))}
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


def _text(k: int, content: object) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        if media := next((name for name in _types(content) if any(kind in name for kind in _MEDIA)), None):
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


def _types(parts: Sequence[Any]) -> list[str]:
    return [str(part.get("type")) for part in parts if isinstance(part, Mapping)]


def _shorten(value: object) -> str:
    written = repr(value)
    return written if len(written) <= 80 else written[:77] + "..."
