"""A conversation as a chat template renders it, before it is tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_opd.alignment.chat_messages import Message
from nemo_opd.alignment.chat_turns import Span, Turn


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Places are characters of `text`."""

    text: str
    messages: Sequence[Message]
    contents: Sequence[Span | None]
    """Contents by message; None: the template leaves the message out."""
    turns: Mapping[int, Turn]
    """Turns by assistant message."""

    def after(self, first: int) -> RenderedChat:
        """Return the same text as a rendering of the messages from `first` on."""
        turns = {k - first: turn for k, turn in self.turns.items() if k >= first}
        return RenderedChat(self.text, self.messages[first:], self.contents[first:], turns)

    def counterpart(self, place: int, other: RenderedChat) -> int:
        """Return the place of `other`, another rendering of the conversation, up to which it says what this one does to
        `place`.

        Within a content that both begin alike, as far; within others, where the content ends.
        """
        for k, span in enumerate(self.contents):
            theirs = other.contents[k]
            if span is None or theirs is None or span.stop <= place:
                continue
            if place <= span.start:
                return theirs.start
            stop = theirs.start + place - span.start
            is_alike = self.text[span.start : place] == other.text[theirs.start : stop]
            return stop if is_alike and stop < theirs.stop else theirs.stop
        return len(other.text)
