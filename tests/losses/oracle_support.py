"""methods.md §3.3, supports and normalisations, with Python floats, sets and sorting."""

from __future__ import annotations

import math

from . import oracle

KINDS = oracle.KINDS
SUPPORTS = ("teacher_topk", "student_topk", "union")
NORMALIZATIONS = ("full", "support", "rest")


def top(logits: list[float], k: int) -> set[int]:
    return set(sorted(range(len(logits)), key=lambda column: -logits[column])[:k])


def columns(z_t: list[float], z_s: list[float], support: str, k: int) -> set[int]:
    if support == "union":
        return top(z_t, k) | top(z_s, k)
    return top(z_t if support == "teacher_topk" else z_s, k)


def cells(p: list[float], chosen: set[int], normalization: str) -> list[float]:
    taken = [p[column] for column in sorted(chosen)]
    if normalization == "support":
        return [mass / math.fsum(taken) for mass in taken]
    if normalization == "rest" and len(chosen) < len(p):
        taken.append(math.fsum(mass for column, mass in enumerate(p) if column not in chosen))
    return taken


def divergence(
    z_t: list[float], z_s: list[float], kind: str, support: str, k: int, normalization: str, tau: float = 1.0, **weights
) -> float:
    """Of one unit, from raw logits, not multiplied by τ²."""
    chosen = columns(z_t, z_s, support, k)
    q, p = oracle.softmax(z_t, tau), oracle.softmax(z_s, tau)
    return oracle.divergence(cells(q, chosen, normalization), cells(p, chosen, normalization), kind, **weights)


def same_vocab(student: list, teacher: list, mask: list, size: int, kind: str, tau: float, **options) -> float:
    """Sum over scored tokens, not divided."""
    total = 0.0
    for z_s, z_t, scored in zip(student, teacher, mask, strict=True):
        for i in range(1, len(scored)):
            if scored[i]:
                total += tau**2 * divergence(z_t[i - 1][:size], z_s[i - 1][:size], kind, tau=tau, **options)
    return total
