"""The beginning of a long text, where a sample needs no more of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_opd.data.text import Encoding

MARGIN = 1024
"""Bytes behind the last token that counts: near a cut a text has other tokens than it has uncut."""
CHARACTERS_A_TOKEN = 8
"""Of a first try."""


def first_tokens(encode: Callable[[str], Encoding], text: str, length: int) -> tuple[str, Encoding]:
    """A beginning of a text and its tokens, more than `length` where the whole text has more.

    It goes on for MARGIN bytes behind the first `length` tokens, which are those of the whole text unless the
    tokenizer's pre-tokenizer or an added token takes a longer run of characters as one. Even then they stand for a
    beginning of the text. The part that is read grows with `length`, not with the text.
    """
    size = CHARACTERS_A_TOKEN * length + MARGIN
    while size < len(text):
        part = encode(text[:size])
        if len(part.ids) > length and part.ends[length - 1] + MARGIN <= part.ends[-1]:
            return text[:size], part
        size *= 2
    return text, encode(text)
