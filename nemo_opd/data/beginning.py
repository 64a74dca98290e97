"""The beginning of a long text, where a sample needs no more of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_opd.data.encoders import Encoder, Encoding
from nemo_opd.data.seams import find_seam

MARGIN = 1024
"""Characters after a seam: what a pre-tokenizer may look at beyond a run of one kind, and a normaliser change."""
CHARACTERS_A_TOKEN = 8
"""Estimate for a first try."""
EDGE = 64
"""Characters by which tokenizers may misplace a token that trims spaces or composes marks."""


def encode_beginning(student: Encoder, teachers: Sequence[Encoder], text: str, length: int) -> list[Encoding]:
    """Encode as much of a text as a sample of `length` tokens of the student needs: for the student, then each teacher.

    The student's first `length` tokens are those of the whole text, with more after them where that has more. So are
    each teacher's for the same characters: a seam follows in either, and MARGIN characters after it. What is read
    grows with `length` and with the distance to the next seam, not with the text. A text without seams, such as one
    letter millions of times, is read whole.

    Raises DataError for a text with a token that a model cannot read.
    """
    size = CHARACTERS_A_TOKEN * length + MARGIN
    while size < len(text):
        if (encodings := _settled(student, teachers, text[:size], length)) is not None:
            return encodings
        size *= 2
    return [encode(text) for encode in (student, *teachers)]


def _settled(student: Encoder, teachers: Sequence[Encoder], part: str, length: int) -> list[Encoding] | None:
    """Encode a part of a text; None where more text might change tokens that the sample has."""
    encodings = []
    needed, latest = 0, min(len(part) - MARGIN, last_run(part))
    for side in (student, *teachers):
        encoding, starts = side.located(part)
        # Of the student by number, as a sample is cut; of teachers by place.
        first = length if side is student else int(np.searchsorted(starts, needed, "right"))
        last = int(np.searchsorted(starts, latest, "right"))
        seam = find_seam(side.pieces, encoding.ids, first, last)
        if seam is None:
            return None
        if side is student:
            needed = int(starts[seam]) + EDGE
        encodings.append(encoding)
    return encodings


def last_run(part: str) -> int:
    """Return where the last run of characters of one kind begins: letters, digits, white space or others.

    How long it is, more text decides, and so how a pre-tokenizer cuts all of it: digits are grouped from their end by
    some.
    """
    of_last = kind(part[-1])
    return next((i + 1 for i in reversed(range(len(part))) if kind(part[i]) != of_last), 0)


def kind(character: str) -> tuple[bool, bool, bool]:
    return character.isalpha(), character.isnumeric(), character.isspace()
