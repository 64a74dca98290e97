"""A conversation rendered by a chat template, before it is tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_opd.alignment.chat_messages import Message
from nemo_opd.alignment.chat_turns import Span, Turn


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation. Places are indices of characters in `text`."""

    text: str
    messages: Sequence[Message]
    contents: Sequence[Span | None]
    """Span of each message's content; None if the template leaves the message out."""
    turns: Mapping[int, Turn]
    """Turns keyed by assistant message."""

    def after(self, first: int) -> RenderedChat:
        """Return the same text as a rendering of the messages from `first` on."""
        turns = {k - first: turn for k, turn in self.turns.items() if k >= first}
        return RenderedChat(self.text, self.messages[first:], self.contents[first:], turns)

    def counterpart(self, place: int, other: RenderedChat) -> int:
        """Return the place in `other`, another rendering of the conversation, that corresponds to `place` here.

        Inside a content, that is the same distance from its beginning if both say the same so far, otherwise its end.
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
