"""shared_prefix, byte_prefix, strict, alm and uld of methods.md §5 with Python floats, loops and dicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nemo_opd.projection import ProjectionMatrix
from nemo_opd.projection.spelling import byte_order

from . import oracle
from .cases import bytes_of


@dataclass(frozen=True)
class Chunk:
    """Aligned tokens of row b."""

    b: int
    student: list[int]
    """Positions of its tokens."""
    teacher: list[int]


def chunks_of(student_chunk_id: list, teacher_chunk_id: list) -> Iterator[Chunk]:
    """Chunks on both sides that hold token 0 of neither."""
    for b, (student, teacher) in enumerate(zip(student_chunk_id, teacher_chunk_id, strict=True)):
        for chunk in sorted(set(student) & set(teacher) - {-1}):
            own = [i for i, c in enumerate(student) if c == chunk]
            theirs = [j for j, c in enumerate(teacher) if c == chunk]
            if own[0] > 0 and theirs[0] > 0:
                yield Chunk(b, own, theirs)


def matrix(
    pairs: list[tuple[int, int]],
    student_size: int,
    teacher_size: int,
    student_map: list[int] | None = None,
    teacher_map: list[int] | None = None,
    byte_prefix: list[int] | None = None,
    teacher: Sequence[bytes | None] | None = None,
    spellings: Sequence[Sequence[int]] | None = None,
    student: Sequence[bytes | None] | None = None,
) -> ProjectionMatrix:
    """A projection of exact pairs only, with maps.

    spellings: also as prefix pieces; by default the token of `byte_prefix` alone.
    """
    if spellings is None and byte_prefix is not None:
        spellings = [[s] if s >= 0 else [] for s in byte_prefix]
    ids = None if spellings is None else np.array([piece for pieces in spellings for piece in pieces], np.int64)
    ends = None if spellings is None else np.cumsum(list(map(len, spellings)))
    indices = np.full((student_size, 1), -1)
    for s, t in pairs:
        indices[s] = t
    return ProjectionMatrix(
        indices,
        (indices >= 0).astype(np.float32),
        indices[:, 0] >= 0,
        teacher_vocab_size=teacher_size,
        student_shared_prefix=student_map,
        teacher_shared_prefix=teacher_map,
        byte_prefix=byte_prefix,
        teacher_byte_order=None if teacher is None else byte_order([piece or b"" for piece in teacher]),
        teacher_spellings=ids,
        teacher_spelling_ends=ends,
        teacher_prefix_pieces=ids,
        teacher_prefix_ends=ends,
        **({} if student is None or teacher is None else bytes_of(student, teacher)),
    )


def identity(size: int) -> ProjectionMatrix:
    every = list(range(size))
    pieces = [bytes([i % 256, i // 256]) for i in every]
    return matrix([(i, i) for i in every], size, size, every, every, every, pieces, [[i] for i in every], pieces)


def pushed(probabilities: list[float], cell_of: list[int]) -> dict[int, float]:
    mass: dict[int, list[float]] = {}
    for token, cell in enumerate(cell_of):
        mass.setdefault(cell, []).append(probabilities[token])
    return {cell: math.fsum(parts) for cell, parts in mass.items()}


def on_common_cells(q: dict[int, float], p: dict[int, float], kind: str, **weights) -> float:
    common = sorted(set(p) & set(q))
    all_q, all_p = math.fsum(q[c] for c in common), math.fsum(p[c] for c in common)
    return oracle.divergence([q[c] / all_q for c in common], [p[c] / all_p for c in common], kind, **weights)


def shared_prefix(
    student: list, teacher: list, maps: tuple[list[int], list[int]], chunks: tuple, kind: str, tau: float, **weights
) -> float:
    """Sum over units, not divided."""
    total = 0.0
    for chunk in chunks_of(*chunks):
        p = oracle.softmax(student[chunk.b][chunk.student[0] - 1][: len(maps[0])], tau)
        q = oracle.softmax(teacher[chunk.b][chunk.teacher[0] - 1][: len(maps[1])], tau)
        total += tau**2 * on_common_cells(pushed(q, maps[1]), pushed(p, maps[0]), kind, **weights)
    return total


def log_likelihood(logits: list, ids: list, positions: list[int]) -> float:
    return math.fsum(math.log(oracle.softmax(logits[i - 1], 1)[ids[i]]) for i in positions)


def alm(student: list, teacher: list, ids: tuple[list, list], chunks: tuple, tau: float) -> float:
    total = 0.0
    for chunk in chunks_of(*chunks):
        a = math.exp(log_likelihood(teacher[chunk.b], ids[1][chunk.b], chunk.teacher) / tau)
        b = math.exp(log_likelihood(student[chunk.b], ids[0][chunk.b], chunk.student) / tau)
        total -= tau * (a * math.log(b) + (1 - a) * math.log1p(-b))
    return total


def uld(student: list, teacher: list, chunks: tuple, tau: float) -> float:
    total = 0.0
    for chunk in chunks_of(*chunks):
        p = sorted(oracle.softmax(student[chunk.b][chunk.student[0] - 1], tau))
        q = sorted(oracle.softmax(teacher[chunk.b][chunk.teacher[0] - 1], tau))
        while p or q:
            total += tau**2 * abs((p.pop() if p else 0) - (q.pop() if q else 0))
    return total


def strict(
    student: list,
    teacher: list,
    ids: tuple[list, list],
    pairs: list[tuple[int, int]],
    chunks: tuple,
    kind: str,
    tau: float,
    top_k: int | None = None,
    rest: bool = False,
    **weights,
) -> tuple[float, int]:
    """Sum over units and their number."""
    total, count = 0.0, 0
    for chunk in chunks_of(*chunks):
        if len(chunk.student) > 1 or len(chunk.teacher) > 1:
            continue
        (i,), (j,) = chunk.student, chunk.teacher
        if (ids[0][chunk.b][i], ids[1][chunk.b][j]) not in pairs:
            continue
        p = oracle.softmax(student[chunk.b][i - 1], tau)
        q = oracle.softmax(teacher[chunk.b][j - 1], tau)
        kept = sorted(pairs, key=lambda pair: -p[pair[0]])[:top_k]
        cells = [[q[t] for _, t in kept], [p[s] for s, _ in kept]]
        if rest and len(kept) < len(p) and len(kept) < len(q):
            cells[0].append(math.fsum(x for t, x in enumerate(q) if t not in {t for _, t in kept}))
            cells[1].append(math.fsum(x for s, x in enumerate(p) if s not in {s for s, _ in kept}))
        t, s = ([x / math.fsum(side) for x in side] for side in cells)
        total += tau**2 * oracle.divergence(t, s, kind, **weights)
        count += 1
    return total, count


def random_ids(seed: int, chunks: tuple[torch.Tensor, torch.Tensor], student_size: int, teacher_size: int) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(size, side.shape, generator=generator)
        for side, size in zip(chunks, (student_size, teacher_size), strict=True)
    )


def byte_prefix(
    student: list,
    teacher: list,
    ids: tuple[list, list],
    phi: list[int],
    pieces: list[bytes | None],
    chunks: tuple,
    kind: str,
    tau: float,
    **weights,
) -> float:
    """Sum over units, not divided; φ and the pieces of the teacher's tokens."""
    total = 0.0
    for chunk in chunks_of(*chunks):
        p = oracle.softmax(student[chunk.b][chunk.student[0] - 1], tau)
        rows = [oracle.softmax(teacher[chunk.b][j - 1], tau) for j in chunk.teacher]
        y = [ids[1][chunk.b][j] for j in chunk.teacher]
        x = ids[0][chunk.b][chunk.student[0]]
        u = pushed(rows[0], phi)
        left_over = [s for s in range(len(p)) if s not in phi]
        own = set(u) - {-1}
        if len(chunk.student) == 1 and len(y) > 1:
            bound = math.prod(q[t] for q, t in zip(rows[:-1], y[:-1], strict=True))
            bound *= math.fsum(q for t, q in enumerate(rows[-1]) if begins(pieces[y[-1]], pieces[t], t == y[-1]))
            u[phi[y[0]]] -= bound
            u[x] = u.get(x, 0) + bound
            own.add(x)
        of_student = {s: p[s] for s in own}
        if len(left_over) > 1:
            of_student[-1] = math.fsum(p[s] for s in left_over if s not in own)
        total += tau**2 * on_common_cells(u, of_student, kind, **weights)
    return total


def begins(piece: bytes | None, other: bytes | None, same: bool) -> bool:
    return same or bool(piece and other and other.startswith(piece))
