"""Tokenization of only the beginning of a long conversation, as far as a sample needs it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nemo_opd.alignment import LocatedTokens, RenderedChat, locate_tokens
from nemo_opd.data.beginning import CHARACTERS_A_TOKEN, EDGE, MARGIN, last_run
from nemo_opd.data.encoders import ChatEncoder
from nemo_opd.data.seams import find_seam


def locate_beginning(side: ChatEncoder, rendered: RenderedChat, length: int) -> LocatedTokens:
    """Tokenize a conversation far enough to know its first `length` tokens and whether more follow.

    Like `encode_beginning`, it reads on to a seam.
    """
    return _locate_to_seam(
        side, rendered.text, CHARACTERS_A_TOKEN * length, lambda part: min(len(part.ids), length + 1)
    )


def locate_up_to(side: ChatEncoder, rendered: RenderedChat, place: int) -> LocatedTokens:
    """Tokenize the rendered conversation up to character `place`, plus EDGE characters."""
    stop = min(place + EDGE, len(rendered.text))

    def num_tokens(part: LocatedTokens) -> int:
        return int(np.searchsorted(part.starts, stop, "right"))

    located = _locate_to_seam(side, rendered.text, stop + MARGIN, num_tokens)
    return located.cut(num_tokens(located))


def _locate_to_seam(
    side: ChatEncoder, text: str, num_characters: int, first_end: Callable[[LocatedTokens], int]
) -> LocatedTokens:
    """Return the tokens before the first seam at or after token `first_end(part)`; without a seam, all tokens.

    num_characters: to try first, without the margin.
    """
    size = num_characters + MARGIN
    while size < len(text):
        part = text[:size]
        located = locate_tokens(side.tokenizer, part)
        latest = min(size - MARGIN, last_run(part))
        seam = find_seam(
            side.pieces, located.ids, first_end(located), int(np.searchsorted(located.starts, latest, "right"))
        )
        if seam is not None:
            return located.cut(seam)
        size *= 2
    return locate_tokens(side.tokenizer, text)
