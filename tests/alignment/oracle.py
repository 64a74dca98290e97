"""What alignment must give, written with sets, strings and recursion instead of pointers and blocks."""

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
    """Chunks of two sequences of pieces, none of them empty, whose bytes are equal in `runs`."""
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
    """What the chunk ids say, checked against the bounds."""
    for c, (i, k, j, m) in enumerate(alignment.bounds.tolist()):
        assert (alignment.student_chunk_id == c).nonzero()[0].tolist() == list(range(i, k))
        assert (alignment.teacher_chunk_id == c).nonzero()[0].tolist() == list(range(j, m))
    assert alignment.student_chunk_id.max(initial=-1) == alignment.num_chunks - 1
    return [
        Chunk((i, k), (j, m), bool(inexact))
        for (i, k, j, m), inexact in zip(alignment.bounds.tolist(), alignment.inexact, strict=True)
    ]


def best_score(a: Sequence[str], b: Sequence[str], match: int, start: int, shift: int) -> int:
    """The best sum over runs of `match` per byte − `start` − `shift` per symbol by which the gap before it is uneven.

    What follows the last run is free. Symbols may be several characters long. Tries every sequence of runs.
    """

    @cache
    def rest(i: int, j: int) -> int:
        best = 0
        for x in range(i, len(a)):
            for y in range(j, len(b)):
                score = -start - shift * abs((x - i) - (y - j))
                for n in range(min(len(a) - x, len(b) - y)):
                    if a[x + n] != b[y + n]:
                        break
                    score += match * len(a[x + n].encode())
                    best = max(best, score + rest(x + n + 1, y + n + 1))
        return best

    return rest(0, 0)


def score_of(a: bytes, b: bytes, runs: Sequence[Run], match: int, start: int, shift: int) -> int:
    """The same sum of given runs; the first, the equal prefix, is free."""
    total = 0
    for (i, j, before), (x, y, length) in pairwise(runs):
        if length:
            uneven = len(a[i + before : x].decode()) - len(b[j + before : y].decode())
            total += match * length - start - shift * abs(uneven)
    return total


def true_runs(text: str, student: Normalizer, teacher: Normalizer) -> NDArray[np.int64]:
    """The runs of two normalised forms of one text, known because the parts of the text are normalised one by one."""
    runs: list[Run] = []
    i = j = 0
    for part in _parts(text):
        left, right = student(part).encode(), teacher(part).encode()
        if left == right:
            if runs and runs[-1][0] + runs[-1][2] == i and runs[-1][1] + runs[-1][2] == j:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + len(left))
            else:
                runs.append((i, j, len(left)))
        i, j = i + len(left), j + len(right)
    return np.array(runs, np.int64).reshape(-1, 3)


def _parts(text: str) -> list[str]:
    """The text in parts that no normaliser looks across: a character with what composes with it."""
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
    """(student byte, teacher byte) where both sides cut inside a run, at least `margin` bytes from what differs."""
    last = int(student_ends.max(initial=0)), int(teacher_ends.max(initial=0))
    found: set[tuple[int, int]] = set()
    for a, b, length in runs.tolist():
        before, after = (margin if a or b else 0), (margin if (a + length, b + length) != last else 0)
        offsets = np.intersect1d(student_ends - a, teacher_ends - b)
        inside = offsets[(offsets >= before) & (offsets <= length - after)]
        found |= {(a + offset, b + offset) for offset in inside.tolist()}
    return found
