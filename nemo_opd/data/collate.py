"""Samples to batches, and batches to the shards of data-parallel ranks."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.data.compared import compared
from nemo_opd.data.samples import Chunks, Sample, TeacherSample, Tokens
from nemo_opd.types import Batch, ChunkRows, SampledRows, TeacherRows, TokenRows

PAD_ID = 0
"""Any id every vocabulary has: causal models do not see padding, and the mask keeps it out of the losses."""
NO_CHUNK = -1

_Scalar = TypeVar("_Scalar", bound=np.generic)


def collate(samples: Sequence[Sample]) -> Batch:
    """Samples as the rows of a batch, right-padded to the longest of each side; routed ones for their teacher alone.

    Bytes are those that all models of a sample predict, chunks those that are compared.
    """
    samples = [compared(sample) for sample in samples]
    teachers = zip(*(sample.teachers for sample in samples), strict=True)
    batch = Batch(_token_rows([sample.student for sample in samples]), tuple(_teacher_rows(rows) for rows in teachers))
    routes = [sample.route for sample in samples if sample.route is not None]
    return only_chosen(batch, torch.tensor(routes)) if routes else batch


def only_chosen(batch: Batch, choice: Tensor) -> Batch:
    """The batch with empty rows where a teacher is not the one of choice, int64 [B], for the sequence.

    An empty row has length 0, no scored token and no chunk, so a (micro)batch of such rows is one position wide.
    """
    return replace(batch, teachers=tuple(_emptied(teacher, choice != i) for i, teacher in enumerate(batch.teachers)))


def pad_rows(batch: Batch, rows: int) -> Batch:
    """The batch with empty sequences behind, so that it has `rows` rows; its own rows are unchanged."""
    missing = rows - len(batch)
    if missing < 0:
        raise ValueError(f"rows={rows} is fewer than the {len(batch)} rows of the batch")
    return Batch(
        _pad_tokens(batch.student, missing),
        tuple(_pad_teacher(teacher, missing) for teacher in batch.teachers),
        None if batch.sampled is None else _pad_sampled(batch.sampled, missing),
    )


def shards(batch: Batch, num_ranks: int) -> list[Batch]:
    """Contiguous parts of the batch, one a rank, in order and complete; sizes differ by one row at most.

    Each is cut to its own longest sequences and owns its memory: a pickled view would carry the whole batch.
    """
    bounds = [len(batch) * rank // num_ranks for rank in range(num_ranks + 1)]
    return [_owned(batch.rows(start, stop)) for start, stop in pairwise(bounds)]


def _token_rows(rows: Sequence[Tokens]) -> TokenRows:
    return TokenRows(
        ids=_padded([row.ids for row in rows], PAD_ID).long(),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
        loss_mask=_padded([row.loss_mask for row in rows], False),
        num_bytes=_padded([row.num_bytes for row in rows], 0),
    )


def _teacher_rows(rows: Sequence[TeacherSample]) -> TeacherRows:
    chunks = [row.chunks for row in rows if row.chunks is not None]
    return TeacherRows(_token_rows([row.tokens for row in rows]), _chunk_rows(chunks) if chunks else None)


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


def _pad_tokens(tokens: TokenRows, missing: int) -> TokenRows:
    return TokenRows(
        _more_rows(tokens.ids, missing, PAD_ID),
        _more_rows(tokens.lengths, missing, 0),
        _more_rows(tokens.loss_mask, missing, False),
        _more_rows(tokens.num_bytes, missing, 0),
    )


def _pad_teacher(teacher: TeacherRows, missing: int) -> TeacherRows:
    chunks = teacher.chunks
    if chunks is not None:
        chunks = ChunkRows(_more_rows(chunks.student, missing, NO_CHUNK), _more_rows(chunks.teacher, missing, NO_CHUNK))
    weights = None if teacher.weights is None else _more_rows(teacher.weights, missing, 0)
    of_rollouts = None if teacher.rollout_weights is None else _more_rows(teacher.rollout_weights, missing, 0)
    return TeacherRows(_pad_tokens(teacher.tokens, missing), chunks, weights, of_rollouts)


def _pad_sampled(sampled: SampledRows, missing: int) -> SampledRows:
    return SampledRows(
        _more_rows(sampled.is_sampled, missing, False),
        _more_rows(sampled.logprobs, missing, 0),
        _more_rows(sampled.behaviour_logprobs, missing, 0),
        _more_rows(sampled.advantages, missing, 0),
        _more_rows(sampled.prompts, missing, -1),
    )


def _more_rows(tensor: Tensor, missing: int, fill: int) -> Tensor:
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), fill)])


def _emptied(teacher: TeacherRows, where: Tensor) -> TeacherRows:
    """Empty rows where bool [B] is true."""
    tokens, chunks, rows = teacher.tokens, teacher.chunks, where[:, None]
    emptied = TokenRows(
        tokens.ids.masked_fill(rows, PAD_ID),
        tokens.lengths.masked_fill(where, 0),
        tokens.loss_mask.masked_fill(rows, False),
        tokens.num_bytes.masked_fill(rows, 0),
    )
    if chunks is not None:
        histories = None if chunks.histories is None else chunks.histories.masked_fill(rows, 0)
        chunks = ChunkRows(
            chunks.student.masked_fill(rows, NO_CHUNK), chunks.teacher.masked_fill(rows, NO_CHUNK), histories
        )
    return TeacherRows(emptied, chunks, teacher.weights, teacher.rollout_weights)


def _owned(batch: Batch) -> Batch:
    sampled = None if batch.sampled is None else _owned_sampled(batch.sampled)
    return Batch(_owned_tokens(batch.student), tuple(_owned_teacher(teacher) for teacher in batch.teachers), sampled)


def _owned_sampled(sampled: SampledRows) -> SampledRows:
    return SampledRows(
        sampled.is_sampled.clone(),
        sampled.logprobs.clone(),
        sampled.behaviour_logprobs.clone(),
        sampled.advantages.clone(),
        sampled.prompts.clone(),
    )


def _owned_tokens(tokens: TokenRows) -> TokenRows:
    return TokenRows(tokens.ids.clone(), tokens.lengths.clone(), tokens.loss_mask.clone(), tokens.num_bytes.clone())


def _owned_teacher(teacher: TeacherRows) -> TeacherRows:
    chunks = teacher.chunks
    owned = None if chunks is None else ChunkRows(chunks.student.clone(), chunks.teacher.clone())
    weights = None if teacher.weights is None else teacher.weights.clone()
    of_rollouts = None if teacher.rollout_weights is None else teacher.rollout_weights.clone()
    return TeacherRows(_owned_tokens(teacher.tokens), owned, weights, of_rollouts)
