"""The objective of ESCD (arXiv 2609.34738, equations 4 to 8) with strings, sets and Python floats."""

from __future__ import annotations

import math
from collections.abc import Sequence

Text = bytes | None
"""Bytes of a token, None for a special one."""


def softmax(logits: Sequence[float], tau: float) -> list[float]:
    top = max(logits)
    odds = [math.exp((z - top) / tau) for z in logits]
    return [x / math.fsum(odds) for x in odds]


def components(texts: Sequence[bytes]) -> list[set[bytes]]:
    """Connected components of the texts; two are linked if one begins with the other."""
    groups: list[set[bytes]] = []
    for text in texts:
        linked = [g for g in groups if any(text.startswith(t) or t.startswith(text) for t in g)]
        groups = [g for g in groups if g not in linked] + [{text}.union(*linked)]
    return groups


def first_piece(text: Text, student: Sequence[Text]) -> int | None:
    """Return the longest student token that begins a text."""
    begins = [s for s, t in enumerate(student) if t and text and text.startswith(t)]
    return max(begins, key=lambda s: len(student[s] or b""), default=None)


def root(q: Sequence[float], p: Sequence[float], student: Sequence[Text], teacher: Sequence[Text]) -> float:
    """KL on the student tokens that begin a teacher token, and one cell for the remaining tokens."""
    target: dict[int | None, float] = {}
    for text, mass in zip(teacher, q, strict=True):
        piece = first_piece(text, student)
        target[piece] = target.get(piece, 0.0) + mass
    student_mass: dict[int | None, float] = {s: p[s] for s in target if s is not None}
    student_mass[None] = math.fsum(x for s, x in enumerate(p) if s not in target)
    return math.fsum(t * (math.log(t) - math.log(student_mass[cell])) for cell, t in target.items())


def child(
    q: Sequence[float], p: Sequence[float], begun: Text, student: Sequence[Text], teacher: Sequence[Text]
) -> float:
    """−Σ M log P after the student token `begun`; p is the student's distribution after it."""
    texts = {t for t in student if t}
    loss = 0.0
    for group in components(sorted({t for t in teacher if t and t not in texts})):
        shortest = min(group, key=len)
        if not begun or not shortest.startswith(begun) or shortest == begun:
            continue
        ending = shortest[len(begun) :]
        completed = math.fsum(x for t, x in zip(student, p, strict=True) if t and t.startswith(ending))
        if completed:
            loss -= math.fsum(x for t, x in zip(teacher, q, strict=True) if t in group) * math.log(completed)
    return loss


def escd(
    student_logits: Sequence[Sequence[float]],
    teacher_logits: Sequence[Sequence[float]],
    ids: Sequence[int],
    student: Sequence[Text],
    teacher: Sequence[Text],
    weight: float,
    tau: float,
) -> float:
    """Sum over the chunks of a text with one token a chunk, without its first token; logits are unshifted."""
    p, q = ([softmax(row, tau) for row in side] for side in (student_logits, teacher_logits))
    total = 0.0
    for i in range(1, len(ids)):
        total += tau**2 * root(q[i - 1], p[i - 1], student, teacher)
        if i + 1 < len(ids):
            total += tau**2 * weight * child(q[i - 1], p[i], student[ids[i]], student, teacher)
    return total
