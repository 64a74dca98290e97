"""Kinds of the student's positions, by their place in the teacher's tokens (methods.md §5.14)."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_opd.losses.arguments import chunk_starts
from nemo_opd.types import ChunkRows, TokenRows

POSITION_KINDS = ("start", "inside", "later", "unaligned")
"""start: first token of a chunk. inside: begins inside the chunk's first teacher token. later: begins inside a later
teacher token of the chunk. unaligned: in no chunk that losses use.
"""
_START, _INSIDE, _LATER, _UNALIGNED = range(len(POSITION_KINDS))


def position_kinds(chunks: ChunkRows, student: TokenRows, teacher: TokenRows) -> Tensor:
    """Return the kind of each student token, as an index into `POSITION_KINDS`: int64 [B, S].

    In a chunk of several teacher tokens the bytes of both sides tell the end of the first one. −1 in such chunks if the
    teacher's bytes are not counted, as not all models predict them.
    """
    is_start, teacher_position = chunk_starts(chunks.student, chunks.teacher)
    place = torch.arange(is_start.shape[1], device=is_start.device).expand_as(is_start)
    start = place.where(is_start, -1).cummax(1).values
    has_start, start = start >= 0, start.clamp(min=0)
    is_aligned = has_start & (chunks.student >= 0) & (chunks.student == chunks.student.gather(1, start))
    bytes_before = student.num_bytes.cumsum(1) - student.num_bytes
    offset = bytes_before - bytes_before.gather(1, start)
    first = teacher_position.gather(1, start)
    following = (first + 1).clamp(max=chunks.teacher.shape[1] - 1)
    is_single = (following == first) | (chunks.teacher.gather(1, following) != chunks.teacher.gather(1, first))
    first_bytes = teacher.num_bytes.gather(1, first)
    kinds = torch.where(is_single | (offset < first_bytes), _INSIDE, _LATER).where(is_single | (first_bytes > 0), -1)
    return kinds.where(~is_start, _START).where(is_aligned, _UNALIGNED)
