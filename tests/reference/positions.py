"""A target for each student token (methods.md §5.7), on a source of three letters with few enough texts to list.

A tokenizer is a sequence of merges; its tokens are strings. A prefix is the tuple of the tokens so far.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

Merges = tuple[tuple[str, str], ...]
Prefix = tuple[str, ...]
Cells = dict[str | None, float]
"""Probabilities of student tokens; the key None is a rest cell."""
LETTERS, LENGTH = "abc", 8


def source(seed: int) -> dict[str, float]:
    """Return the probabilities of all texts; each letter depends on the two before it."""
    draw = random.Random(seed)
    odds: dict[str, list[float]] = defaultdict(lambda: [draw.gammavariate(0.5, 1) + 0.02 for _ in LETTERS])
    texts: dict[str, float] = {}
    for letters in itertools.product(LETTERS, repeat=LENGTH):
        text, p = "".join(letters), 1.0
        for i, letter in enumerate(text):
            weights = odds[text[max(0, i - 2) : i]]
            p *= weights[LETTERS.index(letter)] / sum(weights)
        texts[text] = p
    return texts


@cache
def tokenize(text: str, merges: Merges) -> Prefix:
    tokens = list(text)
    for first, second in merges:
        i = 0
        while i < len(tokens) - 1:
            if tokens[i] == first and tokens[i + 1] == second:
                tokens[i : i + 2] = [first + second]
            i += 1
    return tuple(tokens)


def vocabulary(merges: Merges) -> list[str]:
    return [*LETTERS, *(first + second for first, second in merges)]


def next_tokens(texts: dict[str, float], merges: Merges) -> dict[Prefix, dict[str, float]]:
    """Return the exact distribution of the token after each prefix."""
    mass: dict[Prefix, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for text, p in texts.items():
        tokens = tokenize(text, merges)
        for i, token in enumerate(tokens):
            mass[tokens[:i]][token] += p
    return {prefix: {t: p / math.fsum(masses.values()) for t, p in masses.items()} for prefix, masses in mass.items()}


def targets(
    ours: Prefix, ends: str, student: Merges, teacher: Merges, q: dict[Prefix, dict[str, float]]
) -> Iterator[tuple[int, bool, Cells]]:
    """Yield each student token's index, whether a teacher token begins with it, and the teacher's
    probabilities for it.
    """
    theirs = tokenize("".join(ours), teacher)
    starts, boundaries = begins(ours), begins(theirs)

    def mass_since(k: int, i: int, unusual: bool) -> tuple[Cells, float]:
        """Sum the teacher tokens that begin at boundary k and reach the student's token i."""
        pieces = ours[starts.index(boundaries[k]) : i]
        return (mass_of_bytes if unusual else mass)(q[theirs[:k]], pieces, student)

    for i, a in enumerate(starts):
        j = max(k for k, o in enumerate(boundaries) if o <= a)
        is_inside = a > boundaries[j]
        first = starts.index(boundaries[j])
        unusual = ours[first:i] != tokenize(theirs[j], student)[: i - first]
        cells, ended = mass_since(j, i, unusual)
        if ends == "cover" and j > 0:
            unusual |= ours[starts.index(boundaries[j - 1]) : first] != tokenize(theirs[j - 1], student)
            r = q[theirs[: j - 1]][theirs[j - 1]]
            cells_before, ended_before = mass_since(j - 1, i, unusual)
            cells = {c: r * cells.get(c, 0.0) + cells_before.get(c, 0.0) for c in cells | cells_before}
            ended = r * ended + ended_before
        if is_inside and ends != "drop" and ended:
            cells[None] = ended
        yield i, not is_inside, {c: p / math.fsum(cells.values()) for c, p in cells.items()}


def resampled(text: str, student: Merges, teacher: Merges, draw: random.Random) -> Prefix:
    """Spell each teacher token with student tokens, drawn one by one from all that fit."""
    tokens: list[str] = []
    for token in tokenize(text, teacher):
        while token:
            tokens.append(draw.choice([s for s in vocabulary(student) if token.startswith(s)]))
            token = token.removeprefix(tokens[-1])
    return tuple(tokens)


def mass(q: dict[str, float], pieces: Prefix, student: Merges) -> tuple[Cells, float]:
    """Sum the tokens whose spelling begins with these pieces, keyed by the next piece, and the token that ends with
    them.
    """
    cells: Cells = defaultdict(float)
    ended = 0.0
    for token, p in q.items():
        spelling = tokenize(token, student)
        if spelling == pieces:
            ended += p
        elif spelling[: len(pieces)] == pieces:
            cells[spelling[len(pieces)]] += p
    return cells, ended


def mass_of_bytes(q: dict[str, float], pieces: Prefix, student: Merges) -> tuple[Cells, float]:
    """Sum the tokens that begin with the same letters, keyed by the longest student token that follows."""
    cells: Cells = defaultdict(float)
    text = "".join(pieces)
    for token, p in q.items():
        if token.startswith(text) and token != text:
            ending = token.removeprefix(text)
            cells[max((s for s in vocabulary(student) if ending.startswith(s)), key=len)] += p
    return cells, q.get(text, 0.0)


def begins(tokens: Prefix) -> list[int]:
    return [0, *itertools.accumulate(map(len, tokens[:-1]))]
