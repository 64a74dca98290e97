"""The beginning of a long text, where a sample needs no more of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_opd.data.text import Encoding

MARGIN = 1024
"""Characters, or bytes, behind the last that counts: near a cut a text has other tokens than it has uncut."""
CHARACTERS_A_TOKEN = 8
"""Of a first try."""


def beginning(text: str, num_bytes: int) -> str:
    """Characters with at least the first `num_bytes` bytes of a text, and enough behind that cutting does no harm.

    A character has a byte at least; twice as many, since a normaliser may make fewer bytes of them.
    """
    return text[: 2 * num_bytes + MARGIN]


def first_tokens(encode: Callable[[str], Encoding], text: str, length: int) -> Encoding:
    """Tokens of a text, of which the first `length` and whether there are more are those of the whole text.

    Reads a part of the text that grows with `length`, not with the text.
    """
    size = CHARACTERS_A_TOKEN * length + MARGIN
    while size < len(text):
        part = encode(text[:size])
        if len(part.ids) > length and part.ends[length - 1] + MARGIN <= part.ends[-1]:
            return part
        size *= 2
    return encode(text)
