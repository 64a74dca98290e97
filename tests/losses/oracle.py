"""methods.md §3–§5 with Python floats, loops and dicts: no tensor operation of the code under test."""

from __future__ import annotations

import math

import numpy as np
import torch

from nemo_opd.projection import ProjectionMatrix

KINDS = (("forward_kl", {}), ("reverse_kl", {}), ("tvd", {}), ("jsd", {"beta": 0.3}), ("mixed", {"mixed_weight": 0.2}))


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


def units(student_chunk_id: list, teacher_chunk_id: list) -> list[tuple[int, int, int]]:
    """(row, student position, teacher position) of the predictors of each unit."""
    found = []
    for b, (student, teacher) in enumerate(zip(student_chunk_id, teacher_chunk_id, strict=True)):
        for chunk in sorted(set(student) & set(teacher) - {-1}):
            i, j = student.index(chunk), teacher.index(chunk)
            if i > 0 and j > 0:
                found.append((b, i - 1, j - 1))
    return found


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


def lengths(student_chunk_id: list, teacher_chunk_id: list) -> list[tuple[int, int]]:
    """(m, n) of each unit, in the order of `units`."""
    found = []
    for b, i, _ in units(student_chunk_id, teacher_chunk_id):
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
