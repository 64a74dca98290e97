"""Collation of samples into batches, and the split of a batch into shards of data-parallel ranks."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.data.samples import Chunks, Sample, TeacherSample, Tokens, compared
from nemo_opd.types import NO_CHUNK, PAD_ID, Batch, ChunkRows, MovedRows, TeacherRows, TokenRows

_Scalar = TypeVar("_Scalar", bound=np.generic)


def collate(samples: Sequence[Sample]) -> Batch:
    """Collate samples into a batch, right-padded to the longest of each side. Routed samples are for one teacher alone.

    Bytes count only if all models of a sample predict them; only chunks that are compared have ids.
    """
    samples = [compared(sample) for sample in samples]
    students = [sample.student for sample in samples]
    teachers = zip(*(sample.teachers for sample in samples), strict=True)
    batch = Batch(_token_rows(students), tuple(_teacher_rows(rows, students) for rows in teachers))
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
