"""The losses with a teacher of whom the likeliest tokens alone are known (methods.md §9.1), with floats and dicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nemo_opd.losses import byte_prefix, gold, h_kl, p_kl, same_vocab, shared_prefix, strict, uld
from tests.reference.losses import pairs_of

from . import cases, oracle, oracle_prefix
from .plain import plain_maps

MAPS = plain_maps(cases.pair(), cases.TEACHER)
EXACT = dict(zip(*pairs_of(MAPS), strict=True))
"""Student's token → teacher's."""


@dataclass(frozen=True)
class Known:
    """What is known of one position."""

    masses: dict[int, float]
    top: list[int]
    """The k likeliest, likeliest first."""
    rest: float

    @staticmethod
    def of(logits: list[float], top_k: int, following: int | None, num_tokens: int) -> Known:
        """logits: of a head whose rows beyond `num_tokens` are not tokens; they take places among the likeliest."""
        q = oracle.softmax(logits, 1)
        likeliest = sorted(range(len(q)), key=lambda t: -q[t])[:top_k]
        top = [t for t in likeliest if t < num_tokens]
        kept = {*top} if following is None else {*top, following}
        rest = math.fsum(x for t, x in enumerate(q) if t not in kept)
        if len(q) > num_tokens:  # (13.3)
            in_padding = math.fsum(q[t] for t in likeliest if t >= num_tokens)
            rest = min(rest, (num_tokens - len(kept)) * q[likeliest[-1]] + in_padding)
        return Known({t: q[t] for t in kept}, top, rest)


@dataclass(frozen=True)
class Unit:
    p: list[float]
    q: Known
    chain: list[Known]
    """Positions of the teacher's tokens in the chunk, the first included."""
    x: list[int]
    y: list[int]


def units(batch: cases.Batch, top_k: int, num_tokens: int) -> list[Unit]:
    teacher, ids = batch.teacher.tolist(), (batch.student_ids.tolist(), batch.teacher_ids.tolist())
    chunks = batch.student_chunk_id.tolist(), batch.teacher_chunk_id.tolist()
    found = []
    for chunk in oracle_prefix.chunks_of(*chunks):
        own, theirs = ids[0][chunk.b], ids[1][chunk.b]
        known = [Known.of(teacher[chunk.b][j - 1], top_k, theirs[j], num_tokens) for j in chunk.teacher]
        p = oracle.softmax(batch.student[chunk.b][chunk.student[0] - 1].tolist(), 1)
        found.append(Unit(p, known[0], known, [own[i] for i in chunk.student], [theirs[j] for j in chunk.teacher]))
    return found


def compared(t: dict[int, float], s: dict[int, float], rest_t: float, rest_s: float | None, **options) -> float:
    """Cells of s, of which t reaches those that it has, and the rest."""
    reached = [cell for cell in s if t.get(cell, 0) > 0]
    others = [s[cell] for cell in s if cell not in reached] + ([] if rest_s is None else [rest_s])
    sides = [[t[cell] for cell in reached], [s[cell] for cell in reached]]
    if others:
        sides[0].append(rest_t)
        sides[1].append(math.fsum(others))
    q, p = ([x / math.fsum(side) for x in side] for side in sides)
    return oracle.divergence(q, p, options.get("divergence", "forward_kl"))


def of_same_vocab(unit: Unit, **options) -> float:
    return compared(unit.q.masses, dict(enumerate(unit.p)), unit.q.rest, None, **options)


def of_p_kl(unit: Unit, **options) -> float:
    projected: dict[int, float] = {}
    for s, row in enumerate(cases.ROWS):
        for t, weight in row.items():
            projected[t] = projected.get(t, 0.0) + unit.p[s] * weight
    covered = math.fsum(projected.values())
    return compared(unit.q.masses, projected, unit.q.rest, None, **options) - math.log(covered)


def paired(pairs: dict[int, int]) -> Callable[..., float]:
    def of(
        unit: Unit, uncommon_topk: int = 8192, common_weight: float = 1, uncommon_weight: float = 1, **rest
    ) -> float:
        others_p = [s for s in range(len(unit.p)) if s not in pairs]
        others_q = [t for t in range(len(cases.TEACHER)) if t not in pairs.values()]
        t = {s: unit.q.masses.get(partner, 0.0) for s, partner in pairs.items()}
        rest_t = unit.q.rest + math.fsum(unit.q.masses.get(t, 0.0) for t in others_q)
        rest_s = math.fsum(unit.p[s] for s in others_p)
        value = compared(t, {s: unit.p[s] for s in pairs}, rest_t, rest_s, **rest)
        tail_q = [unit.q.masses[t] for t in unit.q.top if t in others_q]
        tail_p = sorted((unit.p[s] for s in others_p), reverse=True)
        if len(tail_q) == len(others_q):
            tail_q += [0.0] * len(tail_p)
        tail_p += [0.0] * len(tail_q)
        l1 = math.fsum(abs(a - b) for a, b in zip(tail_q[:uncommon_topk], tail_p[:uncommon_topk], strict=False))
        return common_weight * value + uncommon_weight * l1

    return of


def of_strict(unit: Unit, top_k: int | None = None, normalization: str = "support", **options) -> float:
    pairs = EXACT
    if len(unit.x) > 1 or len(unit.y) > 1 or pairs.get(unit.x[0]) != unit.y[0]:
        return math.nan
    kept = sorted(pairs, key=lambda s: -unit.p[s])[:top_k]
    t, s = {s: unit.q.masses.get(pairs[s], 0.0) for s in kept}, {s: unit.p[s] for s in kept}
    if normalization == "support":
        return compared(t, s, unit.q.rest, None, **options)
    return compared(t, s, 1 - math.fsum(t.values()), 1 - math.fsum(s.values()), **options)


def of_shared_prefix(unit: Unit, **options) -> float:
    t: dict[int, float] = {}
    for token, mass in unit.q.masses.items():
        t[cases.TEACHER_CELLS[token]] = t.get(cases.TEACHER_CELLS[token], 0.0) + mass
    s = oracle_prefix.pushed(unit.p, cases.STUDENT_CELLS)
    common = set(cases.STUDENT_CELLS) & set(cases.TEACHER_CELLS)
    s = {cell: mass for cell, mass in s.items() if cell in common}
    return compared(t, s, unit.q.rest + t.pop(-1, 0.0), s.pop(-1), **options)


def of_byte_prefix(unit: Unit, **options) -> float:
    left_over = [s for s in range(len(unit.p)) if s not in cases.PHI]
    u: dict[int, float] = {}
    for token, mass in unit.q.masses.items():
        u[cases.PHI[token]] = u.get(cases.PHI[token], 0.0) + mass
    own = set(cases.PHI) - {-1}
    if len(unit.x) == 1 and len(unit.y) > 1:
        bound = math.prod(known.masses[y] for known, y in zip(unit.chain[:-1], unit.y[:-1], strict=True))
        last, piece = unit.y[-1], cases.TEACHER[unit.y[-1]]
        bound *= math.fsum(
            mass
            for token, mass in unit.chain[-1].masses.items()
            if oracle_prefix.begins(piece, cases.TEACHER[token], token == last)
        )
        u[cases.PHI[unit.y[0]]] -= bound
        u[unit.x[0]] = u.get(unit.x[0], 0.0) + bound
        own.add(unit.x[0])
    rest_s = math.fsum(unit.p[s] for s in left_over if s not in own) if len(left_over) > 1 else None
    rest_t = unit.q.rest + (u.pop(-1, 0.0) if rest_s is not None else 0.0)
    return compared(u, {s: unit.p[s] for s in own}, rest_t, rest_s, **options)


def of_uld(unit: Unit, **options) -> float:
    q = [unit.q.masses[t] for t in unit.q.top]
    p = sorted(unit.p, reverse=True) + [0.0] * len(q)
    by_rank = math.fsum(abs(a - b) for a, b in zip(q, p, strict=False))
    return by_rank + abs(math.fsum(p[len(q) :]) - (1 - math.fsum(q)))


ORACLES = {
    same_vocab: of_same_vocab,
    p_kl: of_p_kl,
    gold: paired(EXACT),
    h_kl: paired(dict(zip(*pairs_of(MAPS, 0.6), strict=True))),
    strict: of_strict,
    shared_prefix: of_shared_prefix,
    byte_prefix: of_byte_prefix,
    uld: of_uld,
}


def value(case: cases.Case, batch: cases.Batch, top_k: int, padding: int = 0) -> float:
    """Mean over the units. padding: last columns of the teacher that are not tokens."""
    num_tokens = batch.teacher.shape[2] - padding
    found = [ORACLES[case.loss](unit, **case.options) for unit in units(batch, top_k, num_tokens)]
    counted = [each for each in found if not math.isnan(each)]
    return math.fsum(counted) / len(counted)
