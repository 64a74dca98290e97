"""Tokenization of only the beginning of a long text, as far as a sample needs it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import LocatedTokens, Pieces, RenderedChat, locate_tokens
from nemo_opd.data.encoders import ChatEncoder, Encoder, Encoding

_MAX_TRIED = 256


def find_seam(pieces: Pieces, ids: NDArray[np.int32], start: int, stop: int) -> int | None:
    """Return an i in [start, stop), 0 < i < S, with a seam before token i; None if _MAX_TRIED places have none."""
    start = max(start, 1)
    if start >= stop:
        return None
    places = np.unique(np.linspace(start, stop - 1, _MAX_TRIED).astype(np.int64)).tolist()
    return next((i for i in places if is_seam(pieces, ids, i)), None)


def is_seam(pieces: Pieces, ids: NDArray[np.int32], i: int) -> bool:
    """Return whether no token spans the place before token i, 0 < i < S. False next to special and unknown tokens."""
    spellings, longest = _spellings_of(pieces)
    left_pieces = spelled(pieces, reversed(ids[max(0, i - longest) : i].tolist()), longest)[::-1]
    head = b"".join(left_pieces)[-longest:]
    tail = b"".join(spelled(pieces, ids[i : i + longest].tolist(), longest))[:longest]
    return bool(head and tail) and not any(
        _spans(spellings, head[start:], tail) for start in reversed(range(len(head)))
    )


def spelled(pieces: Pieces, ids: Iterable[int], num_bytes: int) -> list[bytes]:
    """Return the bytes of successive ids, up to an id without bytes, or until they have `num_bytes` bytes."""
    spellings: list[bytes] = []
    for token_id in ids:
        piece = pieces.bytes_of(token_id)
        if not piece or num_bytes <= 0:
            break
        spellings.append(piece)
        num_bytes -= len(piece)
    return spellings


def _spans(spellings: list[bytes], head: bytes, tail: bytes) -> bool:
    """Return whether some token consists of `head` and a beginning of `tail`."""
    for stop in range(1, len(tail) + 1):
        spelling = head + tail[:stop]
        index = bisect_left(spellings, spelling)
        if index == len(spellings) or not spellings[index].startswith(spelling):
            return False
        if spellings[index] == spelling:
            return True
    return False


@lru_cache(maxsize=8)
def _spellings_of(pieces: Pieces) -> tuple[list[bytes], int]:
    """Return the bytes of all tokens, sorted, and the length of the longest."""
    spellings = sorted(set(pieces.as_list()))
    return spellings, max(map(len, spellings))


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
