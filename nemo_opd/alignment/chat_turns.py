"""Turns of a rendered conversation: all that a model writes, from the generation prompt through the end of the turn.

The turn of assistant message k is the rendering of messages 0 … k after that of messages 0 … k − 1 with the generation
prompt, through its end token (methods.md §1.5). Rendering all these beginnings would take a time quadratic in the
number of messages. The text around a message repeats, so it is rendered once and then recognised.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Self

from nemo_opd.alignment.chat_marks import MarkedConversation, Render, Run
from nemo_opd.alignment.chat_messages import Message


class Span(NamedTuple):
    """Characters [start, stop) of a rendered conversation."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Text that the model writes for one assistant message."""

    spans: tuple[Span, ...]
    """More than one if the template puts another message's text inside the turn."""
    is_ended: bool
    """Whether the last one ends with a token that ends a turn."""

    @property
    def start(self) -> int:
        """The place at which the model takes over from the generation prompt."""
        return self.spans[0].start


@dataclass(frozen=True)
class TurnTokens:
    """Added tokens of a tokenizer, as they are spelled."""

    added: re.Pattern[str]
    stops: Collection[str]
    """Tokens that end a sampled sequence."""
    turn_ends: Collection[str] = ()
    """These, and tokens that end a turn or a message by their role."""

    @classmethod
    def of(cls, added: Collection[str], stops: Collection[str], turn_ends: Collection[str] = ()) -> Self:
        return cls(any_of(added), frozenset(stops), frozenset(turn_ends) | frozenset(stops))

    def end(self, closing: str) -> tuple[int, str]:
        """Find the end of a turn in the text after its message: its place, and the token that ends there.

        That is the first stop token, else the last added token. Without any, the end of the text and "".
        """
        tokens = [(match.end(), match.group()) for match in self.added.finditer(closing)]
        stop = next((token for token in tokens if token[1] in self.stops), None)
        return stop or (tokens[-1] if tokens else (len(closing.rstrip()), ""))

    def closing(self, turn: str) -> int:
        """Return the place from which a turn has added tokens and white space alone."""
        place = len(turn.rstrip())
        for match in reversed(list(self.added.finditer(turn))):
            if turn[match.end() : place].strip():
                break
            place = match.start()
        return place

    def shared(self, a: str, b: str) -> int:
        """Return the length of the common beginning of two texts that cuts no added token of either."""
        length = common_prefix(a, b)
        matches = (match for text in (a, b) for match in self.added.finditer(text))
        return min((match.start() for match in matches if match.start() < length < match.end()), default=length)


def common_prefix(a: str, b: str) -> int:
    """Return the length of the common beginning of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of tokens, of which the longest counts, as in tokenizers. No tokens: it matches nothing."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def locate_messages(
    render: Render, messages: Sequence[Message], text: str, tokens: TurnTokens
) -> tuple[list[Span | None], dict[int, Turn]]:
    """Find each message's content, and the turns of assistant messages, in `text`, the rendered messages.

    Contents are disjoint and in order; None: not rendered. An assistant's content has its thinking and calls. Takes two
    renderings of the conversation, one more if contents have white space at their ends, and a few of its beginning.
    """
    return _Locator(render, messages, text, tokens).located()


class _Locator:
    def __init__(self, render: Render, messages: Sequence[Message], text: str, tokens: TurnTokens) -> None:
        self._render, self._messages, self._text, self._tokens = render, messages, text, tokens
        self._marked = MarkedConversation(render, messages, text)
        self._runs = self._marked.runs
        self._runs_of: dict[int, list[int]] = defaultdict(list)
        for i, run in enumerate(self._runs):
            self._runs_of[run.message].append(i)
        self._last_messages = list(accumulate((run.message for run in self._runs), max))
        self._prompts: dict[tuple[object, ...], list[str]] = defaultdict(list)
        """Text between a message and the model's turn, by the kind of message."""
        self._cut_prompts: dict[tuple[object, ...], int | None] = {}
        """Length of the part of such a text that is there, by kind and the text that is there instead."""
        self._ends: dict[tuple[object, ...], str] = {}
        """Token that ends a turn, by the kind of turn."""
        self._closings: dict[tuple[object, ...], tuple[int, str]] = {}
        """Length of the text that closes a turn and the token at its end, by kind and the text after the turn."""
        self._reached = 0
        """End of the last turn."""

    def located(self) -> tuple[list[Span | None], dict[int, Turn]]:
        contents: list[Span | None] = []
        turns: dict[int, Turn] = {}
        previous = 0
        for k, message in enumerate(self._messages):
            if message["role"] == "assistant":
                content, turn = self._assistant(k)
                if turn is not None:
                    turns[k] = turn
                    self._reached = turn.spans[-1].stop
            else:
                content = self._content(k)
            if content is not None:
                start = max(previous, content.start)
                content = Span(start, max(start, content.stop))
                previous = content.stop
            contents.append(content)
        return contents, turns

    def _content(self, k: int) -> Span | None:
        """Find a content by its first marks; by its text if it can have no marks."""
        if self._runs_of[k]:
            run = self._runs[self._runs_of[k][0]]
            return Span(run.start - self._lead(k, run), run.stop + len(self._trail(run)))
        if self._marked.is_marked(k):
            return None
        start, stop = self._gap(k)
        core = (self._messages[k].get("content") or "").strip()
        at = self._text.find(core, start, stop)
        return None if at < 0 else Span(at, at + len(core))

    def _assistant(self, k: int) -> tuple[Span | None, Turn | None]:
        """Find the content and the turn of assistant message k."""
        if self._has_call_without_marks(k) and (turn := self._between_renderings(k)):
            return turn.spans[0], turn
        content, start = self._content(k), self._takeover(k)
        if start is None:
            if content is None or content.stop == content.start:
                return None, None
            start = content.start
        numbers = self._runs_of[k]
        spans = [Span(self._runs[i].start, self._interrupted(k, i)) for i in numbers[:-1]]
        closed, end = self._closed(k, start)
        spans.append(Span(self._runs[numbers[-1]].start if numbers else start, closed))
        start = min(start, spans[0].start)
        spans[0] = spans[0]._replace(start=start)
        turn = Turn(tuple(spans), end in self._tokens.turn_ends)
        runs = [self._runs[i] for i in numbers]
        has_calls = bool(self._messages[k].get("tool_calls")) and not any(run.has_content for run in runs)
        if has_calls or any(run.has_other for run in runs) or self._has_other_tags(k, runs):
            return Span(start, spans[0].stop - (len(end) if len(spans) == 1 else 0)), turn
        if content is None or content.stop == content.start:
            return Span(start, start), turn
        return Span(max(start, content.start), content.stop), turn

    def _has_call_without_marks(self, k: int) -> bool:
        """Return whether message k has a call that takes no mark, as one without arguments."""
        calls = self._messages[k].get("tool_calls") or []
        return any(call in calls for call in self._marked.messages[k].get("tool_calls") or [])

    def _between_renderings(self, k: int) -> Turn | None:
        """Return the turn between the renderings of the messages before k and of these with k.

        None unless both begin the text.
        """
        before, through = self._render(self._messages[:k], True), self._render(self._messages[: k + 1], False)
        if before is None or through is None or not (through.startswith(before) and self._text.startswith(through)):
            return None
        start = len(before)
        closing = start + self._tokens.closing(through[start:])
        length, end = self._tokens.end(through[closing:])
        return Turn((Span(start, closing + length),), end in self._tokens.turn_ends)

    def _has_other_tags(self, k: int, runs: Sequence[Run]) -> bool:
        """Return whether the template writes tags at a content's ends in another way, as one that parses thinking."""
        edges = self._marked.edges[k]
        if not runs:
            return False
        # Before a single text a tag has nothing to enclose.
        has_texts = runs[0].first == "start" and runs[0].num_before > 1
        is_rewritten = has_texts and self._text[runs[0].start : runs[0].stop] not in self._messages[k]["content"]
        begins_otherwise = has_texts and (is_rewritten or self._lead(k, runs[0]) < len(edges.lead))
        ends_otherwise = runs[-1].last == "end" and self._trail(runs[-1]) != edges.trail
        is_tagged = bool(edges.lead.strip()) or is_rewritten
        has_lost_end = runs[-1].last == "inner"
        return (begins_otherwise and is_tagged) or has_lost_end or bool(ends_otherwise and edges.trail.strip())

    def _gap(self, k: int) -> tuple[int, int]:
        """Return the edges of the text between marks in which the turn of message k begins."""
        i = self._next_run(k)
        return self._runs[i - 1].stop if i else 0, self._start_of_run(i)

    def _next_run(self, k: int) -> int:
        """Return the first run of message k, or of a later one if it has none."""
        return self._runs_of[k][0] if self._runs_of[k] else bisect_left(self._last_messages, k)

    def _start_of_run(self, i: int) -> int:
        return self._runs[i].start if i < len(self._runs) else len(self._text)

    def _lead(self, k: int, run: Run) -> int:
        """Return the length of the content's text before its first mark in the rendered text."""
        lead = self._marked.edges[k].lead
        if run.first in ("start", "end") and lead and self._text.endswith(lead, 0, run.start):
            return len(lead)
        if run.first != "end":
            return 0
        core = (self._messages[k].get("content") or "").strip()  # the template dropped its beginning
        return common_prefix(core[::-1], self._text[: run.start][-len(core) :][::-1]) if core else 0

    def _trail(self, run: Run | None) -> str:
        """Return what follows a run's last mark of its content."""
        trail = self._marked.edges[run.message].trail if run is not None and run.last == "end" else ""
        return trail if run is not None and self._text.startswith(trail, run.stop) else ""

    def _interrupted(self, k: int, i: int) -> int:
        """Return the end of run i of message k and of the text that closes it, before another message's text."""
        run = self._runs[i]
        rendered = self._render(self._marked.messages[: k + 1], False)
        gap = self._text[run.stop : self._start_of_run(i + 1)]
        if rendered is not None and (length := self._tokens.shared(self._marked.after(rendered, run), gap)):
            return run.stop + length
        match = self._tokens.added.search(gap)
        return run.stop + (match.end() if match else 0)

    def _takeover(self, k: int) -> int | None:
        """Return the place at which the model takes over for message k; None if the template writes no turn."""
        i = self._next_run(k)
        before = self._runs[i - 1] if i else None
        start, stop = self._gap(k)
        start += len(self._trail(before))
        gap = self._text[start:stop]
        earlier = self._messages[k - 1] if k else {}
        kind = earlier.get("role"), bool(earlier.get("tool_calls")), before is not None and before.message == k - 1
        for prompt in sorted(self._prompts[kind], key=len, reverse=True):
            if gap.startswith(prompt) and start + len(prompt) >= self._reached:
                return start + len(prompt)
        if (*kind, gap) not in self._cut_prompts:
            rendered = self._prompt(k)
            prompt = (rendered or "").removeprefix(self._trail(before))
            if k and rendered is not None and gap.startswith(prompt):
                self._prompts[kind].append(prompt)
                return start + len(prompt)
            self._cut_prompts[(*kind, gap)] = self._cut_prompt(prompt, gap)
        length = self._cut_prompts[(*kind, gap)]
        if length is None and before is not None and self._messages[before.message]["role"] == "assistant":
            length = 0  # the turn goes on
        if length is not None:
            return start + length
        return self._runs[i].start if self._runs_of[k] else None

    def _prompt(self, k: int) -> str | None:
        """Return the text after the last mark of the messages before k, with the generation prompt.

        Before the first message it is the generation prompt alone. None if the template refuses the messages.
        """
        rendered = self._render(self._marked.messages[: k or 1], True)
        if rendered is None:
            return None
        start = 0 if k else common_prefix(rendered, self._render(self._marked.messages[:1], False) or "")
        return self._marked.tail(rendered[start:])

    def _cut_prompt(self, prompt: str, gap: str) -> int | None:
        """Return the length of the part of the generation prompt with which the text before a turn begins.

        It ends with white space or an added token. None if the template writes none of the prompt there.
        """
        shared = self._tokens.shared(prompt, gap)
        tokens = list(self._tokens.added.finditer(prompt))
        places = {match.end() for match in tokens} | {i + 1 for i, c in enumerate(prompt) if c.isspace()}
        if length := max((place for place in places if place <= shared), default=0):
            return length
        headers = [prompt, *(prompt[match.start() :] for match in tokens)] if prompt else []
        return next((at + len(header) for header in headers if (at := gap.rfind(header)) >= 0), None)

    def _closed(self, k: int, takeover: int) -> tuple[int, str]:
        """Return the end of the turn of message k, and the token that ends it."""
        i = self._runs_of[k][-1] + 1 if self._runs_of[k] else self._next_run(k)
        before = self._runs[i - 1] if i else None
        has_marks = before is not None and before.message == k
        start = before.stop + len(self._trail(before)) if before is not None and has_marks else takeover
        gap = self._text[start : self._start_of_run(i)]
        kind = bool(self._messages[k].get("tool_calls")), before.last if before and has_marks else None
        is_last = k == len(self._messages) - 1
        if not is_last:
            token = self._ends.get(kind, "")
            if token and (at := gap.find(token)) >= 0:
                return start + at + len(token), token
            if (*kind, gap) in self._closings:
                length, token = self._closings[(*kind, gap)]
                return start + length, token
        opening = self._text[before.stop if before else 0 : start]
        length, token = self._tokens.end(gap if is_last else self._closing(k, gap, opening))
        if token in self._tokens.turn_ends and not is_last:
            self._ends[kind] = token
        elif not is_last:
            self._closings[(*kind, gap)] = length, token
        return start + length, token

    def _closing(self, k: int, gap: str, opening: str) -> str:
        """Return the text that closes message k, with which `gap` begins.

        opening: the text between the last mark of messages 0 … k and `gap`. A template may write a turn in another way
        if more messages follow: then it is closed by the first token that ends a turn, if a last turn has an end.
        """
        rendered = self._render(self._marked.messages[: k + 1], False)
        tail = None if rendered is None else self._marked.tail(rendered)
        if tail is not None and tail.startswith(opening) and gap.startswith(tail[len(opening) :]):
            return tail[len(opening) :]
        if tail is None or self._tokens.added.search(tail):
            matches = self._tokens.added.finditer(gap)
            end = next((match.end() for match in matches if match.group() in self._tokens.turn_ends), None)
            if end is not None:
                return gap[:end]
        return gap[: self._tokens.shared(tail or "", gap)]
