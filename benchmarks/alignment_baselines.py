"""Two ways to align tokens that published trainers use, each as good as its idea allows.

Needleman–Wunsch sees token strings and knows no bytes. Character offsets need the text, and the tokenizer's own ids.
"""

from collections.abc import Iterable, Sequence

import numba
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

LONGEST_COMBINATION = 4
"""Tokens of one side that Needleman–Wunsch may set against one of the other."""
_GAP, _PER_TOKEN = -1, 1
_SKIP_STUDENT, _SKIP_TEACHER = 0, 1
_MATCH = 2
"""Moves from here on: _MATCH + 2n takes one student token and n + 1 of the teacher's, _MATCH + 2n + 1 the reverse."""


class TokenStrings:
    """Tokens as text: what the decoder makes of one token alone, so half a character is U+FFFD."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._byte_level = "ByteLevel" in repr(self._backend.decoder)
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        known = self._known
        for token_id in set(ids) - known.keys():
            known[token_id] = self._text(token_id)
        return [known[token_id] for token_id in ids]

    def _text(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        if self._byte_level or token.startswith("<0x"):
            return self._backend.decoder.decode([token])
        return token.replace("▁", " ")


def needleman_wunsch(student: Sequence[str], teacher: Sequence[str]) -> NDArray[np.int32]:
    """Chunks [C, 4] of the best global alignment of two lists of strings. O(S·T) time and memory, in Numba.

    A match is one string against one, or against up to LONGEST_COMBINATION neighbours that spell it together. It
    scores the tokens it takes; a token without a match costs one.
    """
    numbers: dict[str, int] = {}
    return _best_path(_runs(student, numbers), _runs(teacher, numbers))


def _runs(tokens: Sequence[str], numbers: dict[str, int]) -> NDArray[np.int32]:
    """[S, LONGEST_COMBINATION]: a number for the text of the n + 1 tokens that end at i; −1 before the start."""
    runs = np.full((len(tokens), LONGEST_COMBINATION), -1, np.int32)
    for i in range(len(tokens)):
        text = ""
        for n in range(min(i + 1, LONGEST_COMBINATION)):
            text = tokens[i - n] + text
            runs[i, n] = numbers.setdefault(text, len(numbers))
    return runs


@numba.njit  # uncached: the cache holds the name this file was imported by, and there are two
def _best_path(student: NDArray[np.int32], teacher: NDArray[np.int32]) -> NDArray[np.int32]:
    rows, columns = len(student), len(teacher)
    score = np.empty((rows + 1, columns + 1), np.int32)
    move = np.empty((rows + 1, columns + 1), np.int8)
    for j in range(columns + 1):
        score[0, j], move[0, j] = _GAP * j, _SKIP_TEACHER
    for i in range(1, rows + 1):
        score[i, 0], move[i, 0] = _GAP * i, _SKIP_STUDENT
        for j in range(1, columns + 1):
            best, how = score[i - 1, j] + _GAP, _SKIP_STUDENT
            if score[i, j - 1] + _GAP > best:
                best, how = score[i, j - 1] + _GAP, _SKIP_TEACHER
            for n in range(LONGEST_COMBINATION):
                gain = _PER_TOKEN * (n + 2)
                if student[i - 1, 0] == teacher[j - 1, n] and score[i - 1, j - 1 - n] + gain > best:
                    best, how = score[i - 1, j - 1 - n] + gain, _MATCH + 2 * n
                if teacher[j - 1, 0] == student[i - 1, n] and score[i - 1 - n, j - 1] + gain > best:
                    best, how = score[i - 1 - n, j - 1] + gain, _MATCH + 2 * n + 1
            score[i, j], move[i, j] = best, how
    return _walk_back(move)


@numba.njit  # uncached: the cache holds the name this file was imported by, and there are two
def _walk_back(move: NDArray[np.int8]) -> NDArray[np.int32]:
    i, j = move.shape[0] - 1, move.shape[1] - 1
    bounds = np.empty((min(i, j), 4), np.int32)
    first = len(bounds)
    while i > 0 and j > 0:
        how = move[i, j]
        if how == _SKIP_STUDENT:
            i -= 1
        elif how == _SKIP_TEACHER:
            j -= 1
        else:
            n, student_many = (how - _MATCH) // 2, (how - _MATCH) % 2 == 1
            i_start, j_start = (i - 1 - n, j - 1) if student_many else (i - 1, j - 1 - n)
            first -= 1
            bounds[first] = (i_start, i, j_start, j)
            i, j = i_start, j_start
    return bounds[first:]


def character_offsets(student: Iterable[tuple[int, int]], teacher: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """Chunks [C, 4] between the characters at which a token of either side ends, in NumPy. O(S + T).

    Of the tokens that share a character the last one counts: only behind it is the character complete.
    """
    s_ends, s_after = _ends(student)
    t_ends, t_after = _ends(teacher)
    _, i, j = np.intersect1d(s_ends, t_ends, assume_unique=True, return_indices=True)
    s_cuts, t_cuts = np.append(0, s_after[i]), np.append(0, t_after[j])
    return np.stack([s_cuts[:-1], s_cuts[1:], t_cuts[:-1], t_cuts[1:]], axis=1)


def _ends(offsets: Iterable[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The characters at which tokens end, each once, and the number of tokens up to there."""
    ends = np.array([end for _, end in offsets], np.int64)
    last = np.flatnonzero(np.append(ends[1:] != ends[:-1], len(ends) > 0))
    return ends[last], last + 1
