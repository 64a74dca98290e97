"""Places of the contents of messages in a rendered conversation, whatever the chat template does to them.

A template may trim a content, quote it as JSON, put thinking and tool calls around it, drop the thinking of earlier
turns or merge the system prompt into the user's. So contents are not searched for: messages are replaced by a mark, a
private-use character, and what changes in the rendered string is the message's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from nemo_opd.alignment.chat_messages import THINKING, Message
from nemo_opd.errors import AlignmentError

Render = Callable[[Sequence[Message]], str | None]
"""Renders messages; None where the template refuses them."""

_WRITTEN = ("tool_calls", "function_call", *THINKING)
"""Keys of a message, other than its content, that stand for what its author wrote."""
_PRIVATE_USE = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Characters [start, stop) of a rendered conversation."""

    start: int
    stop: int
    fills_template: bool
    """The message changes the template's text in front of it, as thinking does that fills a block which is there
    without it: that text is the author's, too."""


def locate_contents(render: Render, messages: Sequence[Message], text: str) -> list[ContentSpan | None]:
    """Find the span of each message's content in `text`, the rendered messages: disjoint, in order; None: not rendered.

    Takes three renders where the template treats a message without regard to what the others say, otherwise one or
    two a message; spans that would overlap then are cut at the end of the one before. A span that covers more than
    its message's content is narrowed to the content where that is clear, unless an assistant wrote it: there it may
    be calls and thinking.
    """
    return _all_at_once(render, messages, text) or _one_by_one(render, messages, text)


def _all_at_once(render: Render, messages: Sequence[Message], text: str) -> list[ContentSpan | None] | None:
    """Find spans from three renders with marks, of all, even and odd messages; None where they do not fit together.

    The first tells the template's text around every message; in the other two a message stands alone between two
    marks, so what that text leaves of it is the message, even where it looks like the template's text.
    """
    marks = _marks(text, len(messages))
    marked = [_replaced(message, mark) for message, mark in zip(messages, marks, strict=True)]
    pairs = list(zip(messages, marked, strict=True))
    literals = _between(render(marked), marks)
    with_odd = _between(render([pair[k % 2 == 0] for k, pair in enumerate(pairs)]), marks[::2])
    with_even = _between(render([pair[k % 2 == 1] for k, pair in enumerate(pairs)]), marks[1::2])
    if literals is None or with_odd is None or with_even is None:
        return None
    spans: list[ContentSpan | None] = []
    position, kept = 0, len(literals[0])
    for k, (before, after) in enumerate(pairwise(literals)):
        surrounded = (with_odd if k % 2 else with_even)[(k + 1) // 2]
        lead = common_prefix(surrounded, before)
        tail = common_prefix(surrounded[lead:][::-1], after[::-1])
        template, content = before[len(before) - kept : lead], surrounded[lead : len(surrounded) - tail]
        if not text.startswith(template + content, position):
            return None
        start = position + len(template)
        position = start + len(content)
        span = ContentSpan(start, position, fills_template=lead < len(before))
        spans.append(_narrowed(span, messages[k], text))
        kept = tail
    return spans if text[position:] == literals[-1][len(literals[-1]) - kept :] else None


def _one_by_one(render: Render, messages: Sequence[Message], text: str) -> list[ContentSpan | None]:
    """Find each message's span by the change that its mark makes in the whole conversation."""
    (mark,) = _marks(text, 1)
    spans: list[ContentSpan | None] = []
    previous = 0
    for k, message in enumerate(messages):
        found = None
        for replacement in (_replaced(message, mark), _kept_in_form(message, mark)):
            changed = render([*messages[:k], replacement, *messages[k + 1 :]])
            if changed is not None and changed != text:
                found = _narrowed(_changed_span(text, changed, mark), message, text)
                break
        if found is not None:
            start = max(previous, found.start)
            previous = max(start, found.stop)
            found = ContentSpan(start, previous, found.fills_template)
        spans.append(found)
    return spans


def _marks(text: str, count: int) -> list[str]:
    used = set(text)
    free = (character for character in map(chr, _PRIVATE_USE) if character not in used)
    marks = list(islice(free, count))
    if len(marks) < count:
        raise AlignmentError(f"a conversation of {count:,} messages is too long; split it into several rows")
    return marks


def _replaced(message: Message, mark: str) -> Message:
    """Return the message as if its author had written nothing but the mark."""
    return {key: value for key, value in message.items() if key not in _WRITTEN} | {"content": mark}


def _kept_in_form(message: Message, mark: str) -> Message:
    """Keep the calls, with marks as arguments, for templates that refuse a tool's answer without its call."""
    calls = message.get("tool_calls")
    if not calls:
        return {**message, "content": mark}
    return {**message, "content": mark, "tool_calls": [_marked_call(call, mark) for call in calls]}


def _marked_call(call: Message, mark: str) -> Message:
    if "function" in call:
        return {**call, "function": _marked_call(call["function"], mark)}
    return {**call, "arguments": mark if isinstance(call.get("arguments"), str) else {mark: mark}}


def _between(rendered: str | None, marks: Sequence[str]) -> list[str] | None:
    """Return the texts before, between and after the marks; None where they are not there in this order."""
    if rendered is None:
        return None
    parts, start = [], 0
    for mark in marks:
        stop = rendered.find(mark, start)
        if stop < 0:
            return None
        parts.append(rendered[start:stop])
        start = stop + len(mark)
    return [*parts, rendered[start:]]


def _changed_span(text: str, changed: str, mark: str) -> ContentSpan:
    start = common_prefix(text, changed)
    tail = common_prefix(text[start:][::-1], changed[start:][::-1])
    return ContentSpan(start, len(text) - tail, fills_template=start < changed.find(mark))


def _narrowed(span: ContentSpan, message: Message, text: str) -> ContentSpan:
    """Cut template text that depends on the message off its span."""
    region, content = text[span.start : span.stop], message["content"] or ""
    core = content.strip()
    if message["role"] == "assistant" or len(region) <= len(content):
        return span
    if not core:
        return ContentSpan(span.start, span.start, span.fills_template)
    if region.count(core) != 1:
        return span
    start = span.start + region.index(core)
    return ContentSpan(start, start + len(core), span.fills_template)


def common_prefix(a: str, b: str) -> int:
    """Return the length of the common prefix, in O(n) character comparisons and O(log n) Python steps."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
