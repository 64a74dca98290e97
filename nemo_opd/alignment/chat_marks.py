"""Marks inside the messages of a conversation, which show their positions in the rendered text.

A template may trim a content, quote it as JSON, parse thinking out of it, write calls around it or move it. So messages
are not searched for in the rendered text. Instead, each text that a message says gets a private-use character at both
ends, and the conversation is rendered again. Marks keep the form of a message, so a template that looks for a call or a
tag such as `</think>` still finds it.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from nemo_opd.alignment.chat_template import THINKING, Message
from nemo_opd.errors import AlignmentError

Render = Callable[[Sequence[Message], bool], str | None]
"""Function that renders messages with or without the generation prompt; None if the template rejects them."""

_Kind = Literal["start", "end", "inner", "other"]
"""start, end: the first and last mark of a content; a content that is empty or consists of tags has only the latter.
inner: a mark between them. other: a mark in thinking or a call.
"""
_KINDS: tuple[_Kind, ...] = ("start", "end", "inner", "other")
_PRIVATE_USE = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
_IS_PRIVATE = re.compile("([\U000f0000-\U000ffffd\U00100000-\U0010fffd])")
_TAG = re.compile(r"(<[^<>\s]{1,64}>|\[/?[A-Z_]{2,}\])")
"""Words of a content that a template may look for. They have no marks inside."""


@dataclass(frozen=True, slots=True)
class _Mark:
    position: int
    """Index in the text without marks."""
    message: int
    kind: _Kind


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive marks of one message. `start` and `stop` are indices in the text without marks."""

    message: int
    start: int
    stop: int
    first: _Kind
    last: _Kind
    has_content: bool
    has_other: bool
    num_before: int
    """Number of the message's marks before this run's last one."""


@dataclass(frozen=True, slots=True)
class _Edges:
    """A content's text before its first mark and after its last: white space and tags."""

    lead: str = ""
    trail: str = ""


class MarkedConversation:
    """Messages with marks, and the positions of the marks in the rendered text."""

    def __init__(self, render: Render, messages: Sequence[Message], text: str) -> None:
        """Mark all messages whose marks change nothing else in `text`, the rendered messages.

        Takes one rendering if all can be marked, and another if a content begins or ends with white space. Raises
        AlignmentError if there are more messages than marks.
        """
        self._render, self._text = render, text
        self._mark_characters = _mark_characters(text, len(messages))
        self._mark_of_character = {
            c: (k, kind) for k, row in enumerate(self._mark_characters) for c, kind in zip(row, _KINDS, strict=True)
        }
        marked = [self._marked(k, message, keys=True) for k, message in enumerate(messages)]
        result = self._mark_all(messages, marked, range(len(messages)))
        if result is None:
            # A template may look up an argument by its name.
            marked = [self._marked(k, message, keys=False) for k, message in enumerate(messages)]
            result = self._mark_most(list(messages), [], marked, range(len(messages)))
        self.messages, self._marks = result
        """Messages, with marks unless these change other text."""
        self._is_marked = [message != with_marks for message, with_marks in zip(messages, self.messages, strict=True)]
        silent = [k for k, message in enumerate(messages) if marked[k] == message]
        if silent:
            empty = [{**message, "content": self._mark_characters[k][1]} for k, message in enumerate(messages)]
            self.messages, self._marks = self._mark_all(self.messages, empty, silent) or (self.messages, self._marks)
        self._marks = self._without_quotes(self.messages)
        self.runs = self._find_runs(messages)
        """Marked texts, in rendered order."""
        self.edges = self._rendered_edges(marked)
        """For each message, as the template writes them."""

    def is_marked(self, k: int) -> bool:
        """Return whether message k has marks, even if the template leaves it out."""
        return self._is_marked[k]

    def tail(self, rendered: str) -> str:
        """Return the text after the last mark of a rendering."""
        return rendered[max((match.end() for match in self._matches(rendered)), default=0) :]

    def after(self, rendered: str, run: Run) -> str:
        """Return a rendering's text after the last mark of a run, to the next mark or the end."""
        marks = self._matches(rendered)
        numbers = [i for i, mark in enumerate(marks) if self._mark_of_character[mark.group()][0] == run.message]
        if run.num_before >= len(numbers):
            return ""
        i = numbers[run.num_before]
        return rendered[marks[i].end() : marks[i + 1].start() if i + 1 < len(marks) else len(rendered)]

    def _matches(self, rendered: str) -> list[re.Match[str]]:
        return [match for match in _IS_PRIVATE.finditer(rendered) if match.group() in self._mark_of_character]

    def _marked(self, k: int, message: Message, *, keys: bool) -> Message:
        """Return a message with marks. keys: whether argument names get marks, too."""
        start, end, inner, other = self._mark_characters[k]
        marked = dict(message)
        if isinstance(message.get("content"), str):
            marked["content"] = _marked_text(message["content"], start, end, inner)
        for key in THINKING:
            if isinstance(message.get(key), str):
                marked[key] = _marked_text(message[key], other, other, other)
        if message.get("tool_calls"):
            marked["tool_calls"] = [_marked_call(call, other, keys) for call in message["tool_calls"]]
        return marked

    def _mark_most(
        self, messages: list[Message], marks: list[_Mark], marked: Sequence[Message], indices: range
    ) -> tuple[list[Message], list[_Mark]]:
        """Replace the messages at `indices` by marked ones, except those whose marks change other text.

        messages, marks: the result so far. Some templates count or compare contents.
        """
        if result := self._mark_all(messages, marked, indices):
            return result
        if len(indices) == 1:
            return messages, marks
        half = len(indices) // 2
        return self._mark_most(*self._mark_most(messages, marks, marked, indices[:half]), marked, indices[half:])

    def _mark_all(
        self, messages: Sequence[Message], marked: Sequence[Message], indices: Sequence[int]
    ) -> tuple[list[Message], list[_Mark]] | None:
        """Replace messages by marked ones and find the marks; return None if that changes other text."""
        attempt = list(messages)
        for k in indices:
            attempt[k] = marked[k]
        text, marks = self._extract_marks(self._render(attempt, False) or "")
        return (attempt, marks) if text == self._text else None

    def _extract_marks(self, rendered: str) -> tuple[str, list[_Mark]]:
        """Split a rendering into its text without marks, and the marks."""
        texts, marks, position = [], [], 0
        for part in _IS_PRIVATE.split(rendered):
            if part in self._mark_of_character:
                marks.append(_Mark(position, *self._mark_of_character[part]))
            else:
                texts.append(part)
                position += len(part)
        return "".join(texts), marks

    def _rendered_edges(self, marked: Sequence[Message]) -> list[_Edges]:
        """Return each content's edges with only the white space that the template keeps.

        The conversation is rendered again with stripped contents: text between marks shrinks by the white space kept.
        """
        edges = [self._edges(k, message.get("content")) for k, message in enumerate(marked)]
        rendered = [_Edges(edge.lead.lstrip(), edge.trail.rstrip()) for edge in edges]
        if rendered == edges:
            return edges
        text, marks = self._extract_marks(self._render(list(map(_stripped, self.messages)), False) or "")
        if [(mark.message, mark.kind) for mark in marks] != [(mark.message, mark.kind) for mark in self._marks]:
            return rendered
        for i in range(len(marks) + 1):
            previous, following = (marks[i - 1] if i else None), (marks[i] if i < len(marks) else None)
            if previous and following and previous.message == following.message:
                continue
            trail, lead = _kept_white_space(
                _between(self._text, self._marks, i),
                _between(text, marks, i),
                edges[previous.message] if previous and previous.kind == "end" else _Edges(),
                edges[following.message] if following and following.kind in ("start", "end") else _Edges(),
            )
            if previous and previous.kind == "end":
                rendered[previous.message] = replace(rendered[previous.message], trail=trail)
            if following and following.kind in ("start", "end"):
                rendered[following.message] = replace(rendered[following.message], lead=lead)
        return rendered

    def _without_quotes(self, marked: Sequence[Message]) -> list[_Mark]:
        """Drop marks of an assistant message beyond those it has: another message quotes it there."""
        num_left = [
            sum(map(json.dumps(message, ensure_ascii=False, default=str).count, characters))
            if message["role"] == "assistant"
            else None
            for message, characters in zip(marked, self._mark_characters, strict=True)
        ]
        marks = []
        for mark in self._marks:
            if (remaining := num_left[mark.message]) is not None:
                num_left[mark.message] = remaining - 1
            if remaining is None or remaining > 0:
                marks.append(mark)
        return marks

    def _find_runs(self, messages: Sequence[Message]) -> list[Run]:
        """Join neighbouring marks of a message, unless a later message without marks lies between them."""
        unmarked = {
            k: content.strip()
            for k, message in enumerate(messages)
            if not self._is_marked[k] and isinstance(content := message.get("content"), str) and content.strip()
        }
        groups: list[list[_Mark]] = []
        for mark in self._marks:
            last = groups[-1][-1] if groups else None
            is_same = last is not None and last.message == mark.message
            if is_same and unmarked and last is not None:
                between = self._text[last.position : mark.position]
                is_same = not any(k > mark.message and content in between for k, content in unmarked.items())
            if is_same:
                groups[-1].append(mark)
            else:
                groups.append([mark])
        seen = Counter[int]()
        runs = []
        for marks in groups:
            seen[marks[0].message] += len(marks)
            runs.append(_run(marks, seen[marks[0].message] - 1))
        return runs

    def _edges(self, k: int, content: object) -> _Edges:
        start, end = self._mark_characters[k][:2]
        if not isinstance(content, str) or end not in content:
            return _Edges()
        return _Edges(content.partition(start if start in content else end)[0], content.rpartition(end)[2])


def _mark_characters(text: str, num_messages: int) -> list[tuple[str, ...]]:
    """Choose, for each message and kind of mark, a private-use character that is not in the text."""
    used, number = set(text), len(_KINDS) * num_messages
    free = list(islice((c for c in map(chr, _PRIVATE_USE) if c not in used), number))
    if len(free) < number:
        raise AlignmentError(f"a conversation of {num_messages:,} messages is too long; split it into several rows")
    return list(zip(*[iter(free)] * len(_KINDS), strict=True))


def _marked_text(text: str, start: str, end: str, inner: str) -> str:
    """Put marks around each part of a text between tags, inside the white space at its ends."""
    parts = _TAG.split(text)
    spoken = [i for i in range(0, len(parts), 2) if parts[i].strip()]
    if not spoken:
        core = text.rstrip()
        return f"{core}{end}{text[len(core) :]}" if text else text
    for i in spoken:
        parts[i] = _between_marks(parts[i], start if i == spoken[0] else inner, end if i == spoken[-1] else inner)
    return "".join(parts)


def _between_marks(text: str, first: str, last: str) -> str:
    core = text.strip()
    lead, _, trail = text.partition(core)
    return f"{lead}{first}{core}{last}{trail}"


def _marked_call(call: Message, mark: str, keys: bool) -> Message:
    """Mark the names and values of a call's arguments. The function's name has none: its result may repeat the name."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _marked_call(call["function"], mark, keys)}
    return {**call, "arguments": _marked_value(call.get("arguments"), mark, keys)}


def _marked_value(value: Any, mark: str, keys: bool) -> Any:
    if isinstance(value, Mapping):
        return {f"{mark}{key}" if keys else key: _marked_value(item, mark, keys) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked_value(item, mark, keys) for item in value]
    return _between_marks(value, mark, mark) if isinstance(value, str) and value.strip() else value


def _stripped(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": content.strip()} if isinstance(content, str) else message


def _run(marks: Sequence[_Mark], num_before: int) -> Run:
    kinds = {mark.kind for mark in marks}
    first, last = marks[0], marks[-1]
    has_content, has_other = bool(kinds - {"other"}), "other" in kinds
    return Run(first.message, first.position, last.position, first.kind, last.kind, has_content, has_other, num_before)


def _between(text: str, marks: Sequence[_Mark], i: int) -> str:
    """Return the text between mark i − 1, or the beginning, and mark i, or the end."""
    start = marks[i - 1].position if i else 0
    return text[start : marks[i].position if i < len(marks) else len(text)]


def _kept_white_space(gap: str, bare: str, previous: _Edges, following: _Edges) -> tuple[str, str]:
    """Return the trail of one content and the lead of the next, with the white space of theirs that `gap` contains.

    bare: the same gap between contents without white space at their ends.
    """
    trail, lead = previous.trail.rstrip(), following.lead.lstrip()
    trailing, leading = previous.trail[len(trail) :], following.lead[: len(following.lead) - len(lead)]
    more = len(gap) - len(bare)
    if bare.startswith(trail) and bare.endswith(lead):
        for a in range(min(more, len(trailing)), -1, -1):
            b = more - a
            written = (
                trail + trailing[:a] + bare[len(trail) : len(bare) - len(lead)] + leading[len(leading) - b :] + lead
            )
            if b <= len(leading) and gap == written:
                return trail + trailing[:a], leading[len(leading) - b :] + lead
    return trail, lead
