"""The beginning of a long text, where a sample needs no more of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.encoders import Encoder, Encoding
from nemo_opd.data.seams import find_seam

MARGIN = 1024
"""Characters after a seam: what a pre-tokenizer may look at beyond a run of one kind, and a normaliser change."""
CHARACTERS_A_TOKEN = 8
"""Estimate for a first try."""
EDGE = 64
"""Characters by which tokenizers may misplace a token that trims spaces or composes marks, or that follows characters
which a SentencePiece normaliser deletes at the beginning of a text.

A teacher is aligned so far after a student's cut and no further: where the bytes of the two differ, what follows would
decide what is aligned before it.
"""


def encode_beginning(student: Encoder, teachers: Sequence[Encoder], text: str, length: int) -> list[Encoding]:
    """Encode as much of a text as a sample of `length` tokens of the student needs: for the student, then each teacher.

    The student's first `length` tokens are those of the whole text, and more follow where it has more. A teacher's are
    then those of the whole text that start at most EDGE characters after the first token that the student does not
    read; else all. This holds of a part because a seam follows these tokens, and MARGIN characters after it. What is
    tokenized grows with `length` and with the distance to the next seam, not with the text. A text without seams, such
    as one letter millions of times, is tokenized whole.

    Raises DataError for a text with a token that a model cannot read.
    """
    size = CHARACTERS_A_TOKEN * length + EDGE + MARGIN
    while (found := _encodings(student, teachers, text[:size], length, is_whole=size >= len(text))) is None:
        size *= 2
    return found


def _encodings(
    student: Encoder, teachers: Sequence[Encoder], part: str, length: int, is_whole: bool
) -> list[Encoding] | None:
    """Encode a text, or the first part of it: None where more of it might change tokens of the sample."""
    latest = len(part) if is_whole else min(len(part) - MARGIN, last_run(part))

    def is_settled(side: Encoder, encoding: Encoding, starts: NDArray[np.int64], num_tokens: int) -> bool:
        last = int(np.searchsorted(starts, latest, "right"))
        return is_whole or find_seam(side.pieces, encoding.ids, num_tokens, last) is not None

    ours, starts = student.located(part)
    if not is_settled(student, ours, starts, length + 1):
        return None
    encodings = [ours]
    stop = starts[length] + EDGE if length < len(starts) else len(part)
    for side in teachers:
        theirs, starts = side.located(part)
        num_tokens = int(np.searchsorted(starts, stop, "right"))
        if not is_settled(side, theirs, starts, num_tokens):
            return None
        encodings.append(theirs.cut(num_tokens))
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
