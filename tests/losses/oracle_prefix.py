"""shared_prefix, byte_prefix, strict, alm and uld of methods.md §5 with Python floats, loops and dicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nemo_opd.projection import ProjectionMatrix
from nemo_opd.projection.retokenization import byte_order

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


def pushed(probabilities: list[float], cell_of: list[int]) -> dict[int, float]:
    mass: dict[int, list[float]] = {}
    for token, cell in enumerate(cell_of):
        mass.setdefault(cell, []).append(probabilities[token])
    return {cell: math.fsum(parts) for cell, parts in mass.items()}


def random_ids(seed: int, chunks: tuple[torch.Tensor, torch.Tensor], student_size: int, teacher_size: int) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(size, side.shape, generator=generator)
        for side, size in zip(chunks, (student_size, teacher_size), strict=True)
    )


def begins(piece: bytes | None, other: bytes | None, same: bool) -> bool:
    return same or bool(piece and other and other.startswith(piece))
