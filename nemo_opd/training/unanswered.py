"""Exclusion of tokens for which a teacher's servers returned no log-probability (methods.md §13.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.distributed.layout import Layout
from nemo_opd.training.batch_grid import BatchGrid, dp_leader_ranks
from nemo_opd.types import NO_CHUNK, Batch, TeacherRows
from nemo_opd.workers.teacher import TeacherOutput


def only_answered(
    batch: Batch, by_teacher: Sequence[Sequence[TeacherOutput]], grid: BatchGrid
) -> tuple[Batch, list[int | None]]:
    """Remove unanswered targets from the batch; also return each teacher's number of unanswered tokens.

    by_teacher: output of each teacher, indexed by rank, for the padded batch. A target is a token or an aligned chunk,
    which needs all of its tokens. The number is None for a teacher that answers every token by construction. Call
    before units are counted, so that normalizers count only compared units.
    """
    teachers = list(batch.teachers)
    numbers: list[int | None] = []
    for i, (by_rank, layout) in enumerate(zip(by_teacher, grid.teachers, strict=True)):
        is_answered = _join_ranks(batch, i, by_rank, layout, grid)
        numbers.append(None if is_answered is None else int((~is_answered).sum()))
        if is_answered is not None and not is_answered.all():
            teachers[i] = _drop_unanswered(batch.teachers[i], is_answered)
    return replace(batch, teachers=tuple(teachers)), numbers


def _join_ranks(
    batch: Batch, i: int, by_rank: Sequence[TeacherOutput], layout: Layout, grid: BatchGrid
) -> Tensor | None:
    """Join the ranks' `is_answered` for the batch: bool [B, T]; None if the teacher always answers every token."""
    parts = [by_rank[rank].is_answered for rank in dp_leader_ranks(layout)]
    width = batch.teachers[i].tokens.ids.shape[1]
    padded = [F.pad(part, (0, width - part.shape[1]), value=True) for part in parts if part is not None]
    return torch.cat(padded)[grid.is_given(batch)] if padded else None


def _drop_unanswered(rows: TeacherRows, is_answered: Tensor) -> TeacherRows:
    """Return a teacher's rows without unanswered targets. is_answered: bool [B, T]."""
    if rows.chunks is not None:
        # Per sequence, as each numbers its chunks from 0.
        lost = [chunks[~answered] for chunks, answered in zip(rows.chunks.teacher, is_answered, strict=True)]
        student, teacher = (_drop_chunks(side, lost) for side in (rows.chunks.student, rows.chunks.teacher))
        return replace(rows, chunks=replace(rows.chunks, student=student, teacher=teacher))
    if rows.moved is not None:
        width = rows.moved.loss_mask.shape[1]
        places = (torch.arange(width) + rows.moved.by.unsqueeze(1)).clamp(0, is_answered.shape[1] - 1)
        mask = rows.moved.loss_mask & is_answered.gather(1, places)
        return replace(rows, moved=replace(rows.moved, loss_mask=mask))
    return replace(rows, tokens=replace(rows.tokens, loss_mask=rows.tokens.loss_mask & is_answered))


def _drop_chunks(chunk_ids: Tensor, lost: Sequence[Tensor]) -> Tensor:
    """Return chunk ids [B, S] with NO_CHUNK for those in `lost`, one tensor of ids per sequence."""
    is_lost = torch.stack([torch.isin(ids, lost_ids) for ids, lost_ids in zip(chunk_ids, lost, strict=True)])
    return chunk_ids.masked_fill(is_lost, NO_CHUNK)
