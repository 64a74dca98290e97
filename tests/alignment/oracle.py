"""The expected alignment, written with sets, strings and recursion instead of pointers and blocks."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from nemo_opd.types import Alignment

Run = tuple[int, int, int]
"""(start in a, start in b, length)"""
Normalizer = Callable[[str], str]


@dataclass(frozen=True)
class Chunk:
    student: tuple[int, int]
    teacher: tuple[int, int]
    inexact: bool


def expected_chunks(student: list[bytes], teacher: list[bytes], runs: Iterable[Run]) -> list[Chunk]:
    """Return the chunks of two sequences of non-empty pieces whose bytes are equal in `runs`."""
    s_token = {end: i for i, end in enumerate([0, *accumulate(map(len, student))])}
    t_token = {end: j for j, end in enumerate([0, *accumulate(map(len, teacher))])}
    cuts = [
        (s_token[a + k], t_token[b + k], number)
        for number, (a, b, length) in enumerate(runs)
        for k in range(length + 1)
        if a + k in s_token and b + k in t_token
    ]
    return [
        Chunk((i, k), (j, m), first != second) for (i, j, first), (k, m, second) in pairwise(cuts) if k > i and m > j
    ]


def chunks_of(alignment: Alignment) -> list[Chunk]:
    """Return the chunks, after a check that chunk ids and bounds agree."""
    for c, (i, k, j, m) in enumerate(alignment.bounds.tolist()):
        assert (alignment.student_chunk_id == c).nonzero()[0].tolist() == list(range(i, k))
        assert (alignment.teacher_chunk_id == c).nonzero()[0].tolist() == list(range(j, m))
    assert alignment.student_chunk_id.max(initial=-1) == alignment.num_chunks - 1
    return [
        Chunk((i, k), (j, m), bool(inexact))
        for (i, k, j, m), inexact in zip(alignment.bounds.tolist(), alignment.inexact, strict=True)
    ]


def best_score(a: Sequence[str], b: Sequence[str], match: int, start: int, shift: int) -> int:
    """Return the best score of any sequence of runs.

    A run scores `match` for each byte − `start` − `shift` for each symbol that the gap before it is longer on one side.
    Anything after the last run is free. Symbols may be several characters long.
    """

    @cache
    def best_from(i: int, j: int) -> int:
        best = 0
        for x in range(i, len(a)):
            for y in range(j, len(b)):
                score = -start - shift * abs((x - i) - (y - j))
                for n in range(min(len(a) - x, len(b) - y)):
                    if a[x + n] != b[y + n]:
                        break
                    score += match * len(a[x + n].encode())
                    best = max(best, score + best_from(x + n + 1, y + n + 1))
        return best

    return best_from(0, 0)


def score_of(a: bytes, b: bytes, runs: Sequence[Run], match: int, start: int, shift: int) -> int:
    """Return the score of these runs; the first, the equal prefix, is free."""
    total = 0
    for (i, j, previous_length), (x, y, length) in pairwise(runs):
        if length:
            uneven = len(a[i + previous_length : x].decode()) - len(b[j + previous_length : y].decode())
            total += match * length - start - shift * abs(uneven)
    return total


def true_runs(text: str, student: Normalizer, teacher: Normalizer) -> NDArray[np.int64]:
    """Return the runs of two normalised forms of one text, by normalising its parts one by one."""
    runs: list[Run] = []
    i = j = 0
    for part in _parts(text):
        student_part, teacher_part = student(part).encode(), teacher(part).encode()
        if student_part == teacher_part:
            if runs and runs[-1][0] + runs[-1][2] == i and runs[-1][1] + runs[-1][2] == j:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + len(student_part))
            else:
                runs.append((i, j, len(student_part)))
        i, j = i + len(student_part), j + len(teacher_part)
    return np.array(runs, np.int64).reshape(-1, 3)


def _parts(text: str) -> list[str]:
    """Split the text into parts that normalisers treat apart: a character and the characters it composes with."""
    parts: list[str] = []
    for character in text:
        if parts and not character.isascii() and _joins(parts[-1], character):
            parts[-1] += character
        else:
            parts.append(character)
    return parts


def _joins(part: str, character: str) -> bool:
    separate = unicodedata.normalize("NFC", part) + unicodedata.normalize("NFC", character)
    return unicodedata.combining(character) != 0 or unicodedata.normalize("NFC", part + character) != separate


def common_ends(
    student_ends: NDArray[np.int64], teacher_ends: NDArray[np.int64], runs: NDArray[np.int64], margin: int = 0
) -> set[tuple[int, int]]:
    """Return (student byte, teacher byte) of common cuts inside a run, at least `margin` bytes from a difference."""
    last = int(student_ends.max(initial=0)), int(teacher_ends.max(initial=0))
    ends: set[tuple[int, int]] = set()
    for a, b, length in runs.tolist():
        margin_before, margin_after = (margin if a or b else 0), (margin if (a + length, b + length) != last else 0)
        offsets = np.intersect1d(student_ends - a, teacher_ends - b)
        inside = offsets[(offsets >= margin_before) & (offsets <= length - margin_after)]
        ends |= {(a + offset, b + offset) for offset in inside.tolist()}
    return ends
