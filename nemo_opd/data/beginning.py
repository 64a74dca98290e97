"""Tokenization of only the beginning of a long text, as far as a sample needs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.encoders import Encoder, Encoding
from nemo_opd.data.seams import find_seam

MARGIN = 1024
"""Characters kept after a seam: pre-tokenizers may look this far beyond a run of one kind, and normalisers change text.
"""
CHARACTERS_A_TOKEN = 8
"""Estimate for the first attempt."""
EDGE = 64
"""Characters by which tokenizers may misplace a token that trims spaces, composes marks, or follows characters deleted
by a SentencePiece normaliser at the beginning of a text.

A teacher is aligned this far beyond the student's cut and no further. If the bytes of the two differ there, later text
would decide how earlier text is aligned.
"""


def encode_beginning(student: Encoder, teachers: Sequence[Encoder], text: str, length: int) -> list[Encoding]:
    """Tokenize a text as far as a sample of `length` student tokens needs it; return the student's, then each
    teacher's.

    The student's first `length` tokens equal those of the full text, and more follow if the full text has more. A
    teacher has all of its tokens that start at most EDGE characters after the first token the student does not read, or
    all tokens if the student reads the full text. The tokens of a part equal the full text's because a seam follows
    them, and MARGIN characters follow the seam. The cost grows with `length` and with the distance to the next seam,
    not with the text. A text without seams, such as one letter repeated millions of times, is tokenized completely.

    Raises DataError for a text with a token that a model cannot read.
    """
    size = CHARACTERS_A_TOKEN * length + EDGE + MARGIN
    while (encodings := _encodings(student, teachers, text[:size], length, is_whole=size >= len(text))) is None:
        size *= 2
    return encodings


def _encodings(
    student: Encoder, teachers: Sequence[Encoder], part: str, length: int, is_whole: bool
) -> list[Encoding] | None:
    """Tokenize a text or its first part. Return None if more text might change tokens of the sample."""
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
    """Return the start of the last run of characters of one kind: letters, digits, white space or others.

    More text may lengthen the run and so change how a pre-tokenizer splits all of it: some group digits from the end.
    """
    last_kind = kind(part[-1])
    return next((i + 1 for i in reversed(range(len(part))) if kind(part[i]) != last_kind), 0)


def kind(character: str) -> tuple[bool, bool, bool]:
    return character.isalpha(), character.isnumeric(), character.isspace()
