"""The form of a conversation: what every chat template can render."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_opd.errors import AlignmentError

Message = Mapping[str, Any]

THINKING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which messages have what their author thought before the content."""

_MEDIA = ("image", "video", "audio")
"""Words in the types of parts that are no text, such as `image_url`."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with string contents: None and no content are empty, the texts of a list of parts are joined.

    Raises AlignmentError for what is no list of mappings with a role, for other contents, and for no messages.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise AlignmentError(
            f"a conversation must be a list of messages such as {{'role': 'user', 'content': 'Hi'}}, "
            f"not {type(messages).__name__}"
        )
    if not messages:
        raise AlignmentError("a conversation without messages cannot be rendered; drop it from the data")
    return [_plain(k, message) for k, message in enumerate(messages)]


def said_by(message: Message) -> tuple[str, ...]:
    """Return the texts that the author of a plain message wrote: content, thinking, and the functions that it calls."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    # Some files have one thought under several keys, of which a template reads one.
    thoughts = dict.fromkeys(text for text in map(message.get, THINKING) if isinstance(text, str))
    written = [message["content"], *thoughts, *(call.get("name") for call in calls)]
    return tuple(text for text in written if isinstance(text, str) and text)


def _plain(k: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise AlignmentError(
            f"messages[{k}] is {_short(message)}, which is no mapping with a role; write for example "
            "{'role': 'user', 'content': 'Hi'}"
        )
    return {**message, "content": _text(k, message.get("content"))}


def _text(k: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        if media := next((name for name in _types(content) if any(kind in name for kind in _MEDIA)), None):
            raise AlignmentError(
                f"messages[{k}].content has a part of type {media!r}, and models read the text of conversations alone; "
                "leave the row out, or that part where the text makes sense without it"
            )
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(map(str, parts))
    raise AlignmentError(
        f"messages[{k}].content is {_short(content)}; it must be a string, None or a list of text parts such as "
        "{'type': 'text', 'text': 'Hi'} (write a tool's result as JSON text)"
    )


def _types(parts: Sequence[Any]) -> list[str]:
    return [str(part.get("type")) for part in parts if isinstance(part, Mapping)]


def _short(value: object) -> str:
    written = repr(value)
    return written if len(written) <= 80 else written[:77] + "..."
