"""Collation of samples into batches, with the bytes that all models predict, and the split of a batch into shards of
data-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.data.samples import Chunks, Sample, TeacherSample, Tokens
from nemo_opd.types import NO_CHUNK, PAD_ID, Batch, ChunkRows, MovedRows, TeacherRows, TokenRows

_Scalar = TypeVar("_Scalar", bound=np.generic)


def collate(samples: Sequence[Sample]) -> Batch:
    """Collate samples into a batch, right-padded to the longest of each side. Routed samples are for one teacher alone.

    A teacher's bytes, and `shared_bytes`, count only if all models of a sample predict them. Only chunks that are
    compared have ids.
    """
    students = [sample.student for sample in samples]
    shared = [compared(sample) for sample in samples]
    teachers = tuple(
        _teacher_rows(rows, students) for rows in zip(*(sample.teachers for sample in shared), strict=True)
    )
    shared_bytes = _padded([sample.student.num_bytes for sample in shared], 0) if teachers else None
    batch = Batch(_token_rows(students), teachers, shared_bytes=shared_bytes)
    routes = [sample.route for sample in samples if sample.route is not None]
    return mask_unrouted(batch, torch.tensor(routes)) if routes else batch


def mask_unrouted(batch: Batch, choice: Tensor) -> Batch:
    """Empty each teacher's rows for sequences whose `choice`, int64 [B], is another teacher.

    An empty row has length 0, no scored token and no chunk, so a (micro)batch of such rows is one position wide.
    """
    return replace(batch, teachers=tuple(rows.without(choice != i) for i, rows in enumerate(batch.teachers)))


def row_ids(counts: Sequence[int]) -> Tensor:
    """Return the row index of each sequence: int64 [Σ counts]. counts: number of sequences in each row."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def gather_rows(batch: Batch, places: Tensor) -> Batch:
    """Gather sequences of a batch by index, int64 [number]; −1 gives an empty sequence."""
    return batch.map(lambda tensor, fill: torch.cat([tensor, torch.full_like(tensor[:1], fill)])[places])


def shards(batch: Batch, num_ranks: int) -> list[Batch]:
    """Split the batch into contiguous shards, one per rank, whose sizes differ by one row at most.

    Each is cut to its own longest sequences and owns its memory: a pickled view would carry the whole batch.
    """
    bounds = [len(batch) * rank // num_ranks for rank in range(num_ranks + 1)]
    return [batch.rows(start, stop).map(lambda tensor, _: tensor.clone()) for start, stop in pairwise(bounds)]


def compared(sample: Sample) -> Sample:
    """Keep the byte counts of only those tokens whose content all models of the sample predict.

    These models are the student and the teachers that read the text: the routed one, or all. Only complete tokens
    count: a stretch between two token boundaries that all models share counts if each model learns all its tokens from
    the same bytes. So all sides have the same number of bytes. Excluded are the start of a text that some side reads
    without a predictor, text beyond some side's limit, text that a side rewrites, the templates' own text, and marks of
    one role, which may be text on one side only.
    """
    readers = [i for i in range(len(sample.teachers)) if sample.route in (None, i)]
    is_kept = _compared_tokens(sample.student, [sample.teachers[i] for i in readers])
    student = replace(sample.student, num_bytes=np.where(is_kept, sample.student.num_bytes, np.int32(0)))
    teachers = [
        _teacher_bytes(teacher, sample.student, student, is_kept) if i in readers else teacher
        for i, teacher in enumerate(sample.teachers)
    ]
    return replace(sample, student=student, teachers=tuple(teachers))


def _compared_tokens(student: Tokens, teachers: Sequence[TeacherSample]) -> NDArray[np.bool_]:
    """Mark the student's tokens in stretches that are compared completely: bool [S]."""
    is_read = student.loss_mask.copy()
    opens = np.ones(len(student), np.bool_)
    for teacher in teachers:
        if teacher.chunks is None:
            is_read &= teacher.at_student(teacher.tokens.loss_mask, len(student))
            continue
        chunk = teacher.chunks.student
        is_read &= (chunk >= 0) & ~np.isin(chunk, teacher.chunks.marks)
        opens[1:] &= (chunk[1:] != chunk[:-1]) | (chunk[1:] < 0)
    stretch = np.cumsum(opens) - 1
    is_whole = np.ones(len(student), np.bool_)
    is_whole[stretch[~is_read]] = False
    return is_whole[stretch]


def _teacher_bytes(
    teacher: TeacherSample, original: Tokens, student: Tokens, is_kept: NDArray[np.bool_]
) -> TeacherSample:
    """Keep the byte counts of a teacher's tokens in the compared stretches.

    original: the student's tokens before their byte counts were reduced to those of `student`.
    """
    if teacher.chunks is None:
        if teacher.tokens is original:
            return replace(teacher, tokens=student)
        return replace(teacher, tokens=replace(teacher.tokens, num_bytes=teacher.at_teacher(student.num_bytes)))
    ours, theirs = teacher.chunks.student, teacher.chunks.teacher
    # One entry more than chunks: id −1, no chunk, reads the last, which stays false.
    is_counted = np.zeros(int(max(ours.max(initial=-1), theirs.max(initial=-1))) + 2, np.bool_)
    is_counted[ours[is_kept & (ours >= 0)]] = True
    num_bytes = np.where(is_counted[theirs], teacher.tokens.num_bytes, np.int32(0))
    return replace(teacher, tokens=replace(teacher.tokens, num_bytes=num_bytes))


def _token_rows(rows: Sequence[Tokens]) -> TokenRows:
    return TokenRows(
        ids=_padded([row.ids for row in rows], PAD_ID).long(),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
        loss_mask=_padded([row.loss_mask for row in rows], False),
        num_bytes=_padded([row.num_bytes for row in rows], 0),
    )


def _teacher_rows(rows: Sequence[TeacherSample], students: Sequence[Tokens]) -> TeacherRows:
    chunks = [row.chunks for row in rows if row.chunks is not None]
    leakage = [row.leakage for row in rows if row.leakage is not None]
    return TeacherRows(
        _token_rows([row.tokens for row in rows]),
        _chunk_rows(chunks) if chunks else None,
        moved=_moved_rows(rows, students),
        leakage=torch.tensor(leakage, dtype=torch.int64) if leakage else None,
        variants=tuple(_token_rows(variant) for variant in zip(*(row.variants for row in rows), strict=True)),
    )


def _moved_rows(rows: Sequence[TeacherSample], students: Sequence[Tokens]) -> MovedRows | None:
    moved = [row.moved_by for row in rows if row.moved_by is not None]
    if not moved:
        return None
    sides = zip(rows, students, strict=True)
    masks = [student.loss_mask & row.at_student(row.tokens.loss_mask, len(student)) for row, student in sides]
    return MovedRows(torch.tensor(moved, dtype=torch.int64), _padded(masks, False))


def _chunk_rows(rows: Sequence[Chunks]) -> ChunkRows:
    students, teachers = zip(*(row.compared for row in rows), strict=True)
    histories = torch.tensor([row.histories for row in rows], dtype=torch.int64)
    return ChunkRows(_padded(students, NO_CHUNK), _padded(teachers, NO_CHUNK), histories)


def _padded(rows: Sequence[NDArray[_Scalar]], fill: int) -> Tensor:
    width = max(1, *(len(row) for row in rows))
    out = np.full((len(rows), width), fill, dtype=rows[0].dtype)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(out)
