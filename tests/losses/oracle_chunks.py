"""The losses of aligned chunks (methods.md §5) with Python floats, loops and dicts."""

from __future__ import annotations

import math

import numpy as np

from nemo_opd.projection import ProjectionMatrix

from . import oracle


def lengths(student_chunk_id: list, teacher_chunk_id: list) -> list[tuple[int, int]]:
    """(m, n) of each unit, in the order of `oracle.units`."""
    found = []
    for b, i, _ in oracle.units(student_chunk_id, teacher_chunk_id):
        chunk = student_chunk_id[b][i + 1]
        found.append((student_chunk_id[b].count(chunk), teacher_chunk_id[b].count(chunk)))
    return found


def paired_matrix(student: int, teacher: int, num_pairs: int, seed: int) -> ProjectionMatrix:
    """`num_pairs` exact rows of scattered ids; the others empty, of one entry, or of weights (0.7, 0.3) or (.5, .5)."""
    rng = np.random.default_rng(seed)
    exact = np.zeros(student, dtype=bool)
    exact[rng.choice(student, size=num_pairs, replace=False)] = True
    partners = iter(rng.permutation(teacher)[:num_pairs])
    indices = np.full((student, 2), -1, dtype=np.int32)
    weights = np.zeros((student, 2), dtype=np.float32)
    shapes = ((), (1.0,), (0.7, 0.3), (0.5, 0.5))
    for s in range(student):
        row = (1.0,) if exact[s] else shapes[int(rng.integers(len(shapes)))]
        targets = [next(partners)] if exact[s] else rng.choice(teacher, size=len(row), replace=False)
        indices[s, : len(row)] = targets
        weights[s, : len(row)] = row
    return ProjectionMatrix(indices, weights, exact, teacher_vocab_size=teacher)


def exact_pairs(matrix: ProjectionMatrix) -> dict[int, int]:
    return {s: int(matrix.indices[s].max()) for s in range(len(matrix.indices)) if matrix.exact[s]}


def relaxed_pairs(matrix: ProjectionMatrix) -> dict[int, int]:
    """Every claim in turn against the best so far."""
    best: dict[int, int] = {}

    def rank(s: int) -> tuple[bool, float, int]:
        return bool(matrix.exact[s]), float(matrix.weights[s].max()), -s

    for s, (ts, ws) in enumerate(zip(matrix.indices.tolist(), matrix.weights.tolist(), strict=True)):
        weight, t = max(zip(ws, ts, strict=True))
        if t >= 0 and weight >= 0.6 and (t not in best or rank(s) > rank(best[t])):
            best[t] = s
    return {s: t for t, s in sorted(best.items(), key=lambda pair: pair[1])}


def paired(
    student: list,
    teacher: list,
    pairs: dict[int, int],
    sizes: tuple[int, int],
    chunks: tuple[list, list],
    kind: str,
    tau: float = 1.0,
    common: float = 1.0,
    uncommon: float = 1.0,
    top_k: int = 8192,
    **weights,
) -> float:
    """gold (exact pairs) and h_kl (relaxed pairs). Sum over units, not divided."""
    total = 0.0
    others_p = [s for s in range(sizes[0]) if s not in pairs]
    others_q = [t for t in range(sizes[1]) if t not in pairs.values()]
    for b, i, j in oracle.units(*chunks):
        p = oracle.softmax(student[b][i][: sizes[0]], tau)
        q = oracle.softmax(teacher[b][j][: sizes[1]], tau)
        cells_p, cells_q = [p[s] for s in pairs], [q[t] for t in pairs.values()]
        if others_p and others_q:
            cells_p.append(math.fsum(p[s] for s in others_p))
            cells_q.append(math.fsum(q[t] for t in others_q))
        cells_p = [cell / math.fsum(cells_p) for cell in cells_p]
        cells_q = [cell / math.fsum(cells_q) for cell in cells_q]
        tail_p = sorted((p[s] for s in others_p), reverse=True)[:top_k]
        tail_q = sorted((q[t] for t in others_q), reverse=True)[:top_k]
        zeros = [0.0] * max(len(tail_p), len(tail_q))
        l1 = math.fsum(abs(a - b) for a, b, _ in zip(tail_p + zeros, tail_q + zeros, zeros, strict=False))
        total += tau**2 * (common * oracle.divergence(cells_q, cells_p, kind, **weights) + uncommon * l1)
    return total


def most_important(matrix: oracle.Matrix, teacher_rows: list, top_k: int) -> list[int]:
    """Covered columns by their largest logit in rows of logits."""
    covered = sorted({t for row in matrix.rows() for t in row})
    return sorted(covered, key=lambda t: (-max(row[t] for row in teacher_rows), t))[:top_k]


def p_kl_top_k(
    student: list,
    teacher: list,
    matrix: oracle.Matrix,
    chunks: tuple[list, list],
    kind: str,
    tau: float,
    coef: float,
    kept: list[int],
    **weights,
) -> float:
    """p_kl with `vocab_topk` that keeps these columns. Sum over units, not divided."""
    rows, total = matrix.rows(), 0.0
    covered = sorted({t for row in rows for t in row})
    others = [t for t in covered if t not in kept]
    for b, i, j in oracle.units(*chunks):
        p = oracle.softmax(student[b][i][: matrix.student_vocab_size], tau)
        q = oracle.softmax(teacher[b][j][: matrix.teacher_vocab_size], tau)
        projected = {t: math.fsum(p[s] * row.get(t, 0.0) for s, row in enumerate(rows)) for t in covered}
        p_covered, q_covered = math.fsum(projected.values()), math.fsum(q[t] for t in covered)
        cells_p, cells_q = [projected[t] for t in kept], [q[t] for t in kept]
        if others:
            cells_p.append(math.fsum(projected[t] for t in others))
            cells_q.append(math.fsum(q[t] for t in others))
        value = oracle.divergence([x / q_covered for x in cells_q], [x / p_covered for x in cells_p], kind, **weights)
        total += tau**2 * (value - coef * math.log(p_covered))
    return total


def merged(logits: list, chunks: tuple[list, list], side: int, size: int, tau: float, arithmetic: bool) -> list:
    """Logits with, where a unit has its first position, the log-mean of its positions: merge=mean is first of these."""
    result = [[list(row) for row in rows] for rows in logits]
    for unit, size_of in zip(oracle.units(*chunks), lengths(*chunks), strict=True):
        b, first = unit[0], unit[1 + side]
        rows = [oracle.softmax(logits[b][first + k][:size], tau) for k in range(size_of[side])]
        columns = list(zip(*rows, strict=True))
        if arithmetic:
            result[b][first] = [math.log(math.fsum(column) / len(rows)) for column in columns]
        else:
            result[b][first] = [math.fsum(math.log(p) for p in column) / len(rows) for column in columns]
    return result
