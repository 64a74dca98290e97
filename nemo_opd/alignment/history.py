"""Comparison of the contents that two sides have read before a chunk (methods.md §1.6)."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import AnyStr

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.backend import META_SPACE
from nemo_opd.types import HISTORY_CHANGED, HISTORY_REWRITTEN, HISTORY_SAME


@dataclass(frozen=True, slots=True)
class ReadText:
    """Text that one side has read, and the special tokens in it."""

    data: bytes
    """Without special tokens."""
    places: NDArray[np.int64]
    """[N]: bytes of `data` before each special token; non-decreasing."""
    contents: Sequence[bytes]
    """[N]: bytes of the text that spells each special token."""
    is_outside: Sequence[bool]
    """[N]: whether the special token begins the sequence, or is aligned with one of the other side."""

    def spellings(self, start: int, stop: int) -> set[str]:
        """Return the plain texts of data[start:stop] without special tokens, with those that are not outside, and with
        all.

        Special tokens at either end are included.
        """
        first, last = np.searchsorted(self.places, start, "left"), np.searchsorted(self.places, stop, "right")
        without, inside, full = bytearray(), bytearray(), bytearray()
        at = start
        for n in range(first, last):
            for text in (without, inside, full):
                text += self.data[at : self.places[n]]
            at = int(self.places[n])
            full += self.contents[n]
            if not self.is_outside[n]:
                inside += self.contents[n]
        return {_plain_text(bytes(text) + self.data[at:stop]) for text in (without, inside, full)}


def run_histories(student: ReadText, teacher: ReadText, runs: NDArray[np.int64]) -> NDArray[np.int8]:
    """Classify what both sides have read before each run of equal bytes from `equal_runs`: [R].

    HISTORY_REWRITTEN if the regions between runs agree up to white space, Unicode form, and special tokens that one
    side has read as such and the other letter by letter.
    """
    histories = np.full(len(runs), HISTORY_SAME, np.int8)
    if len(runs) > 1:
        histories[1:] = HISTORY_REWRITTEN
        changed = _first_changed(student, teacher, runs)
        histories[changed:] = HISTORY_CHANGED
    return histories


def _first_changed(student: ReadText, teacher: ReadText, runs: NDArray[np.int64]) -> int:
    """Return the first run after a region of different text, or the number of runs."""
    if _plain_text(student.data) == _plain_text(teacher.data):
        return len(runs)
    for r, ((a, b, length), (a_next, b_next, _)) in enumerate(zip(runs[:-1].tolist(), runs[1:].tolist(), strict=True)):
        a_start, b_start = a + length, b + length
        # Only the first run may end inside a character.
        while _continues(student.data, a_start) or _continues(teacher.data, b_start):
            a_start, b_start = a_start - 1, b_start - 1
        if student.spellings(a_start, a_next).isdisjoint(teacher.spellings(b_start, b_next)):
            return r + 1
    return len(runs)


def _continues(data: bytes, at: int) -> bool:
    """Return whether the byte at `at` continues a UTF-8 character."""
    return 0 < at < len(data) and data[at] & 0xC0 == 0x80


def chunk_histories(
    bounds: NDArray[np.int32], edges: Sequence[NDArray[np.int64]], runs: NDArray[np.int64], histories: NDArray[np.int8]
) -> NDArray[np.int8]:
    """Return the history of each chunk [C], which is its run's.

    edges: byte edges of the student's tokens and of the teacher's.
    """
    if len(runs) == 1:
        return np.zeros(len(bounds), np.int8)
    starts = (edges[0][bounds[:, 0]], edges[1][bounds[:, 2]])
    run = np.minimum(*(np.searchsorted(runs[:, side], starts[side], "right") - 1 for side in (0, 1)))
    return histories[np.maximum(run, 0)]


def content_history(student: bytes, teacher: bytes, texts: Sequence[str]) -> int:
    """Compare two sides' renderings of a message with these texts.

    HISTORY_SAME: equal bytes, or all texts unchanged on both sides, each in its own place, among different marks of the
    templates. HISTORY_REWRITTEN: the same up to white space and Unicode form, or both sides omit the same. Otherwise,
    HISTORY_CHANGED.
    """
    if student == teacher:
        return HISTORY_SAME
    spelled = [(text.encode(),) for text in texts]
    if texts and all(_holds_all(side, spelled) for side in (student, teacher)):
        return HISTORY_SAME
    ours, theirs = _plain_text(student), _plain_text(teacher)
    plain = [_plain_forms(text) for text in texts]
    all_ours, all_theirs = (bool(texts) and _holds_all(side, plain) for side in (ours, theirs))
    leaves_out_the_same = not (all_ours or all_theirs) and ours and theirs and (ours in theirs or theirs in ours)
    if ours == theirs or (all_ours and all_theirs) or leaves_out_the_same:
        return HISTORY_REWRITTEN
    return HISTORY_CHANGED


def _holds_all(rendering: AnyStr, texts: Sequence[tuple[AnyStr, ...]]) -> bool:
    """Return whether a rendering contains each text, in one of its forms and in its own place.

    An answer that repeats a thought does not count as the thought. The longest texts are matched first.
    """
    parts = [rendering]
    for forms in sorted(texts, key=lambda forms: len(forms[0]), reverse=True):
        match = next(((i, form) for form in forms for i, part in enumerate(parts) if form in part), None)
        if match is None:
            return False
        i, form = match
        before, after = _split_around(parts[i], form)
        parts[i : i + 1] = before, after
    return True


def _split_around(part: AnyStr, form: AnyStr) -> tuple[AnyStr, AnyStr]:
    start = part.index(form)
    return part[:start], part[start + len(form) :]


def _plain_forms(text: str) -> tuple[str, ...]:
    """Return a text's plain form, and that of its JSON string, since templates may quote tools' results."""
    return _plain_text(text.encode()), _plain_text(json.dumps(text, ensure_ascii=False)[1:-1].encode())


def _plain_text(data: bytes) -> str:
    """Return the text without white space, in Unicode's form for equivalent characters (NFKC).

    `▁` counts as white space: SentencePiece tokenizers write a space as `▁`, and read `▁` in a text as a space.
    """
    text = unicodedata.normalize("NFKC", data.decode("utf-8", "replace"))
    return "".join(text.replace(META_SPACE, " ").split())
