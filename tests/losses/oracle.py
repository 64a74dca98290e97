"""methods.md §3–§5 with Python floats, loops and dicts: no tensor operation of the code under test."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

KINDS = (("forward_kl", {}), ("reverse_kl", {}), ("tvd", {}), ("jsd", {"beta": 0.3}), ("mixed", {"mixed_weight": 0.2}))


@dataclass(frozen=True)
class Matrix:
    """What the losses use of a projection."""

    indices: np.ndarray
    weights: np.ndarray
    student_vocab_size: int
    teacher_vocab_size: int
    exact: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))

    @staticmethod
    def identity(size: int) -> Matrix:
        return Matrix(np.arange(size, dtype=np.int32)[:, None], np.ones((size, 1), dtype=np.float32), size, size)

    @staticmethod
    def random(student: int, teacher: int, k: int, seed: int) -> Matrix:
        """Rows of 0 to k entries, stochastic where not empty; some columns are uncovered for k·student near teacher."""
        rng = np.random.default_rng(seed)
        indices = np.full((student, k), -1, dtype=np.int32)
        weights = np.zeros((student, k), dtype=np.float32)
        for s in range(student):
            n = int(rng.integers(0, k + 1)) if s else k
            indices[s, :n] = rng.choice(teacher, size=n, replace=False)
            raw = 0.1 ** np.arange(n)
            weights[s, :n] = raw / raw.sum() if n else 0
        return Matrix(indices, weights, student, teacher)

    def rows(self) -> list[dict[int, float]]:
        return [
            {int(t): float(w) for t, w in zip(ts, ws, strict=True) if t >= 0}
            for ts, ws in zip(self.indices, self.weights, strict=True)
        ]


def softmax(logits: list[float], temperature: float) -> list[float]:
    top = max(logits)
    powers = [math.exp((z - top) / temperature) for z in logits]
    return [power / math.fsum(powers) for power in powers]


def kl(a: list[float], b: list[float]) -> float:
    return math.fsum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)


def divergence(t: list[float], s: list[float], kind: str, beta: float = 0.5, mixed_weight: float = 0.5) -> float:
    if kind == "forward_kl":
        return kl(t, s)
    if kind == "reverse_kl":
        return kl(s, t)
    if kind == "tvd":
        return math.fsum(abs(x - y) for x, y in zip(t, s, strict=True)) / 2
    if kind == "mixed":
        return mixed_weight * kl(t, s) + (1 - mixed_weight) * kl(s, t)
    m = [beta * x + (1 - beta) * y for x, y in zip(t, s, strict=True)]
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def same_vocab(student: list, teacher: list, mask: list, size: int, kind: str, tau: float = 1.0, **weights) -> float:
    """Sum over scored tokens, not divided."""
    total = 0.0
    for z_s, z_t, scored in zip(student, teacher, mask, strict=True):
        for i in range(1, len(scored)):
            if scored[i]:
                q, p = softmax(z_t[i - 1][:size], tau), softmax(z_s[i - 1][:size], tau)
                total += tau**2 * divergence(q, p, kind, **weights)
    return total


def units(student_chunk_id: list, teacher_chunk_id: list) -> list[tuple[int, int, int]]:
    """(row, student position, teacher position) of the predictors of each unit."""
    found = []
    for b, (student, teacher) in enumerate(zip(student_chunk_id, teacher_chunk_id, strict=True)):
        for chunk in sorted(set(student) & set(teacher) - {-1}):
            i, j = student.index(chunk), teacher.index(chunk)
            if i > 0 and j > 0:
                found.append((b, i - 1, j - 1))
    return found


def p_kl(
    student: list,
    teacher: list,
    matrix: Matrix,
    chunks: tuple[list, list],
    kind: str,
    tau: float,
    coef: float,
    **weights,
) -> float:
    """Sum over units, not divided."""
    rows, total = matrix.rows(), 0.0
    for b, i, j in units(*chunks):
        p = softmax(student[b][i][: matrix.student_vocab_size], tau)
        q = softmax(teacher[b][j][: matrix.teacher_vocab_size], tau)
        projected: dict[int, float] = {}
        for s, row in enumerate(rows):
            for t, weight in row.items():
                projected[t] = projected.get(t, 0.0) + weight * p[s]
        covered, q_covered = sum(projected.values()), sum(q[t] for t in projected)
        q_hat = [q[t] / q_covered for t in projected]
        p_hat = [mass / covered for mass in projected.values()]
        total += tau**2 * (divergence(q_hat, p_hat, kind, **weights) - coef * math.log(covered))
    return total


def random_chunk_ids(rng: np.random.Generator, num_rows: int, student_len: int, teacher_len: int) -> tuple:
    """Chunks of 1-3 tokens a side, with tokens of no chunk before some of them and a tail of none; int32 tensors."""
    sides: tuple[list, list] = ([], [])
    for _ in range(num_rows):
        student: list[int] = []
        teacher: list[int] = []
        chunk = 0
        while True:
            lead = (int(rng.integers(0, 2)), int(rng.integers(0, 2)))
            size = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
            if len(student) + lead[0] + size[0] > student_len or len(teacher) + lead[1] + size[1] > teacher_len:
                break
            student += [-1] * lead[0] + [chunk] * size[0]
            teacher += [-1] * lead[1] + [chunk] * size[1]
            chunk += 1
        sides[0].append(student + [-1] * (student_len - len(student)))
        sides[1].append(teacher + [-1] * (teacher_len - len(teacher)))
    return tuple(torch.tensor(side, dtype=torch.int32) for side in sides)
