"""Tokens of a rendered conversation, with the characters they stand for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.chat_turns import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class LocatedTokens:
    """A text, its tokens, and the characters that each token stands for."""

    text: str
    ids: NDArray[np.int32]
    """[S]"""
    starts: NDArray[np.int64]
    """[S]: first character; tokens of the same character share it."""
    ends: NDArray[np.int64]
    """[S]: end of the last character."""

    def cut(self, length: int) -> LocatedTokens:
        """Cut to the first `length` tokens."""
        return LocatedTokens(self.text, self.ids[:length], self.starts[:length], self.ends[:length])

    def at(self, character: int) -> int:
        """Return the first token with text at or after a character."""
        return int(np.searchsorted(self.ends, character, "right"))

    def spans(self, contents: Sequence[Span | None]) -> NDArray[np.int32]:
        """Return token spans [M, 2] of contents.

        A token across an edge belongs to the content; one across two contents, to the first.
        """
        spans = np.zeros((len(contents), 2), np.int32)
        previous = 0
        for k, content in enumerate(contents):
            start = stop = previous
            if content is not None:
                start = max(previous, self.at(content.start))
                following = int(np.searchsorted(self.starts, content.stop, "left"))
                stop = max(start, following) if content.stop > content.start else start
            spans[k] = start, stop
            previous = stop
        return spans

    def inside(self, span: Span, added: Collection[int]) -> slice:
        """Return the tokens of a span that the model writes.

        A token across the beginning is the model's, unless it is an added token: a header's last token may absorb the
        white space after it.
        """
        if span.start == span.stop:
            return slice(0, 0)
        first = self.at(span.start)
        if first < len(self.ids) and self.starts[first] < span.start and int(self.ids[first]) in added:
            first += 1
        return slice(first, int(np.searchsorted(self.starts, span.stop, "left")))


def locate_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> LocatedTokens:
    """Tokenize a rendered text. The template writes special tokens itself, so none are added.

    Characters that no token claims go to a neighbour: spaces that some tokenizers trim from a token's offsets go to
    that token; marks that a normaliser composed with the character before go to that character's token.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    starts, ends = offsets[:, 0].copy(), offsets[:, 1].copy()
    for i in np.flatnonzero(starts[1:] > ends[:-1]).tolist():
        if text[ends[i] : starts[i + 1]].isspace():
            starts[i + 1] = ends[i]
        else:
            ends[i] = starts[i + 1]
    return LocatedTokens(text, np.array(encoded["input_ids"], np.int32), starts, ends)
