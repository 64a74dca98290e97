"""Turns of a rendered conversation: everything a model writes, from the generation prompt through the end of the turn.

The turn of assistant message k extends from the rendering of messages 0 … k − 1 with the generation prompt to its end
token in the rendering of messages 0 … k (methods.md §1.5). Rendering all these beginnings would take time quadratic in
the number of messages. The text around messages repeats, so it is rendered once and then recognised.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Self

from nemo_opd.alignment.chat_marks import MarkedConversation, Render, Run
from nemo_opd.alignment.chat_template import Message


class Span(NamedTuple):
    """Characters [start, stop) of a rendered conversation."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Text that the model writes for one assistant message."""

    spans: tuple[Span, ...]
    """Several if the template puts another message's text inside the turn."""
    is_ended: bool
    """Whether the last span ends with a token that ends a turn."""

    @property
    def start(self) -> int:
        """End of the generation prompt, from where the model writes."""
        return self.spans[0].start


@dataclass(frozen=True)
class TurnTokens:
    """Spellings of a tokenizer's added tokens."""

    added: re.Pattern[str]
    stops: Collection[str]
    """Tokens that end a sampled sequence."""
    turn_ends: Collection[str] = ()
    """`stops`, and tokens whose role is to end a turn or a message."""

    @classmethod
    def of(cls, added: Collection[str], stops: Collection[str], turn_ends: Collection[str] = ()) -> Self:
        return cls(token_pattern(added), frozenset(stops), frozenset(turn_ends) | frozenset(stops))

    def end(self, closing: str) -> tuple[int, str]:
        """Find the end of a turn in the text after its message: its place, and the token that ends there.

        The first stop token counts, otherwise the last added token. Without either, return the end of the text and "".
        """
        tokens = [(match.end(), match.group()) for match in self.added.finditer(closing)]
        stop = next((token for token in tokens if token[1] in self.stops), None)
        return stop or (tokens[-1] if tokens else (len(closing.rstrip()), ""))

    def closing(self, turn: str) -> int:
        """Return the start of a turn's final added tokens and white space."""
        place = len(turn.rstrip())
        for match in reversed(list(self.added.finditer(turn))):
            if turn[match.end() : place].strip():
                break
            place = match.start()
        return place

    def shared(self, a: str, b: str) -> int:
        """Return the length of the common beginning of two texts, cut before an added token it would split."""
        length = common_prefix(a, b)
        matches = (match for text in (a, b) for match in self.added.finditer(text))
        return min((match.start() for match in matches if match.start() < length < match.end()), default=length)


def common_prefix(a: str, b: str) -> int:
    """Return the length of the common beginning of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def token_pattern(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of tokens, the longest first as in tokenizers; without tokens, it matches nothing."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def locate_messages(
    render: Render, messages: Sequence[Message], text: str, tokens: TurnTokens
) -> tuple[list[Span | None], dict[int, Turn]]:
    """Find each message's content, and the turns of assistant messages, in `text`, the rendered messages.

    Contents are disjoint and in order, and None if they are not rendered. An assistant's content includes its thinking
    and calls. Takes two renderings of the conversation, another if contents have white space at their ends, and a few
    of its beginning.
    """
    return _Locator(render, messages, text, tokens).locate()


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
        """Texts between a message and the model's turn, keyed by the kind of message."""
        self._cut_prompts: dict[tuple[object, ...], int | None] = {}
        """Length of the part of such a text that is written, keyed by kind and the text found in its place."""
        self._ends: dict[tuple[object, ...], str] = {}
        """Token that ends a turn, keyed by the kind of turn."""
        self._closings: dict[tuple[object, ...], tuple[int, str]] = {}
        """Length of the text that closes a turn and the token at its end, keyed by kind and the text after the turn."""
        self._last_turn_end = 0
        """End of the last turn."""

    def locate(self) -> tuple[list[Span | None], dict[int, Turn]]:
        contents: list[Span | None] = []
        turns: dict[int, Turn] = {}
        previous = 0
        for k, message in enumerate(self._messages):
            if message["role"] == "assistant":
                content, turn = self._find_assistant(k)
                if turn is not None:
                    turns[k] = turn
                    self._last_turn_end = turn.spans[-1].stop
            else:
                content = self._find_content(k)
            if content is not None:
                start = max(previous, content.start)
                content = Span(start, max(start, content.stop))
                previous = content.stop
            contents.append(content)
        return contents, turns

    def _find_content(self, k: int) -> Span | None:
        """Find a content by its first marks, or by its text if it cannot have marks."""
        if self._runs_of[k]:
            run = self._runs[self._runs_of[k][0]]
            return Span(run.start - self._lead_length(k, run), run.stop + len(self._trail(run)))
        if self._marked.is_marked(k):
            return None
        start, stop = self._gap_before_turn(k)
        core = (self._messages[k].get("content") or "").strip()
        at = self._text.find(core, start, stop)
        return None if at < 0 else Span(at, at + len(core))

    def _find_assistant(self, k: int) -> tuple[Span | None, Turn | None]:
        """Find the content and the turn of assistant message k."""
        if self._has_call_without_marks(k) and (turn := self._turn_between_renderings(k)):
            return turn.spans[0], turn
        content, start = self._find_content(k), self._find_takeover(k)
        if start is None:
            if content is None or content.stop == content.start:
                return None, None
            start = content.start
        numbers = self._runs_of[k]
        spans = [Span(self._runs[i].start, self._interruption(k, i)) for i in numbers[:-1]]
        closed, end = self._find_turn_end(k, start)
        spans.append(Span(self._runs[numbers[-1]].start if numbers else start, closed))
        start = min(start, spans[0].start)
        spans[0] = spans[0]._replace(start=start)
        turn = Turn(tuple(spans), end in self._tokens.turn_ends)
        runs = [self._runs[i] for i in numbers]
        has_calls = bool(self._messages[k].get("tool_calls")) and not any(run.has_content for run in runs)
        if has_calls or any(run.has_other for run in runs) or self._rewrites_tags(k, runs):
            return Span(start, spans[0].stop - (len(end) if len(spans) == 1 else 0)), turn
        if content is None or content.stop == content.start:
            return Span(start, start), turn
        return Span(max(start, content.start), content.stop), turn

    def _has_call_without_marks(self, k: int) -> bool:
        """Return whether message k has a call that takes no mark, such as one without arguments."""
        calls = self._messages[k].get("tool_calls") or []
        return any(call in calls for call in self._marked.messages[k].get("tool_calls") or [])

    def _turn_between_renderings(self, k: int) -> Turn | None:
        """Return the turn between the renderings of the messages before k and of those through k.

        None unless both are beginnings of the text.
        """
        prefix, through = self._render(self._messages[:k], True), self._render(self._messages[: k + 1], False)
        if prefix is None or through is None or not (through.startswith(prefix) and self._text.startswith(through)):
            return None
        start = len(prefix)
        closing = start + self._tokens.closing(through[start:])
        length, end = self._tokens.end(through[closing:])
        return Turn((Span(start, closing + length),), end in self._tokens.turn_ends)

    def _rewrites_tags(self, k: int, runs: Sequence[Run]) -> bool:
        """Return whether the template rewrites tags at a content's ends, as one that parses thinking does."""
        edges = self._marked.edges[k]
        if not runs:
            return False
        # A tag before a single text encloses nothing.
        has_texts = runs[0].first == "start" and runs[0].num_before > 1
        is_rewritten = has_texts and self._text[runs[0].start : runs[0].stop] not in self._messages[k]["content"]
        begins_otherwise = has_texts and (is_rewritten or self._lead_length(k, runs[0]) < len(edges.lead))
        ends_otherwise = runs[-1].last == "end" and self._trail(runs[-1]) != edges.trail
        is_tagged = bool(edges.lead.strip()) or is_rewritten
        has_lost_end = runs[-1].last == "inner"
        return (begins_otherwise and is_tagged) or has_lost_end or bool(ends_otherwise and edges.trail.strip())

    def _gap_before_turn(self, k: int) -> tuple[int, int]:
        """Return the edges of the text between marks that contains the start of message k's turn."""
        i = self._next_run(k)
        return self._runs[i - 1].stop if i else 0, self._start_of_run(i)

    def _next_run(self, k: int) -> int:
        """Return the first run of message k, or of a later message if it has none."""
        return self._runs_of[k][0] if self._runs_of[k] else bisect_left(self._last_messages, k)

    def _start_of_run(self, i: int) -> int:
        return self._runs[i].start if i < len(self._runs) else len(self._text)

    def _lead_length(self, k: int, run: Run) -> int:
        """Return the length of the content's rendered text before its first mark."""
        lead = self._marked.edges[k].lead
        if run.first in ("start", "end") and lead and self._text.endswith(lead, 0, run.start):
            return len(lead)
        if run.first != "end":
            return 0
        core = (self._messages[k].get("content") or "").strip()  # the template dropped its beginning
        return common_prefix(core[::-1], self._text[: run.start][-len(core) :][::-1]) if core else 0

    def _trail(self, run: Run | None) -> str:
        """Return the rendered text of a run's content after its last mark."""
        trail = self._marked.edges[run.message].trail if run is not None and run.last == "end" else ""
        return trail if run is not None and self._text.startswith(trail, run.stop) else ""

    def _interruption(self, k: int, i: int) -> int:
        """Return the end of run i of message k and its closing text, before another message's text."""
        run = self._runs[i]
        rendered = self._render(self._marked.messages[: k + 1], False)
        gap = self._text[run.stop : self._start_of_run(i + 1)]
        if rendered is not None and (length := self._tokens.shared(self._marked.after(rendered, run), gap)):
            return run.stop + length
        match = self._tokens.added.search(gap)
        return run.stop + (match.end() if match else 0)

    def _find_takeover(self, k: int) -> int | None:
        """Return the end of the generation prompt for message k, or None if the template writes no turn."""
        i = self._next_run(k)
        previous = self._runs[i - 1] if i else None
        start, stop = self._gap_before_turn(k)
        start += len(self._trail(previous))
        gap = self._text[start:stop]
        earlier = self._messages[k - 1] if k else {}
        kind = earlier.get("role"), bool(earlier.get("tool_calls")), previous is not None and previous.message == k - 1
        for prompt in sorted(self._prompts[kind], key=len, reverse=True):
            if gap.startswith(prompt) and start + len(prompt) >= self._last_turn_end:
                return start + len(prompt)
        if (*kind, gap) not in self._cut_prompts:
            rendered = self._prompt_before(k)
            prompt = (rendered or "").removeprefix(self._trail(previous))
            if k and rendered is not None and gap.startswith(prompt):
                self._prompts[kind].append(prompt)
                return start + len(prompt)
            self._cut_prompts[(*kind, gap)] = self._cut_prompt_length(prompt, gap)
        length = self._cut_prompts[(*kind, gap)]
        if length is None and previous is not None and self._messages[previous.message]["role"] == "assistant":
            length = 0  # the turn goes on
        if length is not None:
            return start + length
        return self._runs[i].start if self._runs_of[k] else None

    def _prompt_before(self, k: int) -> str | None:
        """Return the text after the last mark of the messages before k, with the generation prompt.

        For the first message it is the generation prompt alone. None if the template rejects the messages.
        """
        rendered = self._render(self._marked.messages[: k or 1], True)
        if rendered is None:
            return None
        start = 0 if k else common_prefix(rendered, self._render(self._marked.messages[:1], False) or "")
        return self._marked.tail(rendered[start:])

    def _cut_prompt_length(self, prompt: str, gap: str) -> int | None:
        """Return the length of the part of the generation prompt that begins the text before a turn.

        It ends with white space or an added token. None if the template writes no part of the prompt there.
        """
        shared = self._tokens.shared(prompt, gap)
        tokens = list(self._tokens.added.finditer(prompt))
        places = {match.end() for match in tokens} | {i + 1 for i, c in enumerate(prompt) if c.isspace()}
        if length := max((place for place in places if place <= shared), default=0):
            return length
        headers = [prompt, *(prompt[match.start() :] for match in tokens)] if prompt else []
        return next((at + len(header) for header in headers if (at := gap.rfind(header)) >= 0), None)

    def _find_turn_end(self, k: int, takeover: int) -> tuple[int, str]:
        """Return the end of message k's turn, and the token that ends it."""
        i = self._runs_of[k][-1] + 1 if self._runs_of[k] else self._next_run(k)
        previous = self._runs[i - 1] if i else None
        has_marks = previous is not None and previous.message == k
        start = previous.stop + len(self._trail(previous)) if previous is not None and has_marks else takeover
        gap = self._text[start : self._start_of_run(i)]
        kind = bool(self._messages[k].get("tool_calls")), previous.last if previous and has_marks else None
        is_last = k == len(self._messages) - 1
        if not is_last:
            token = self._ends.get(kind, "")
            if token and (at := gap.find(token)) >= 0:
                return start + at + len(token), token
            if (*kind, gap) in self._closings:
                length, token = self._closings[(*kind, gap)]
                return start + length, token
        opening = self._text[previous.stop if previous else 0 : start]
        length, token = self._tokens.end(gap if is_last else self._closing_text(k, gap, opening))
        if token in self._tokens.turn_ends and not is_last:
            self._ends[kind] = token
        elif not is_last:
            self._closings[(*kind, gap)] = length, token
        return start + length, token

    def _closing_text(self, k: int, gap: str, opening: str) -> str:
        """Return the beginning of `gap` that closes message k.

        opening: the text between the last mark of messages 0 … k and `gap`. A template may write a turn differently if
        more messages follow. Then the first token that ends a turn closes it, if the last turn has an end.
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
