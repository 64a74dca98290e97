"""Units of losses and their counts (methods.md §7.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host
from nemo_opd.losses.arguments import check_same_length
from nemo_opd.types import Batch, SampledRows


@dataclass(frozen=True, slots=True)
class ChunkUnits:
    """Aligned chunks whose first tokens have a predicting logit row on both sides."""

    student_rows: Tensor
    """int64 [U]: indices into [B·S] of the logits that predict each chunk's first student token."""
    teacher_rows: Tensor
    """int64 [U]: indices into [B·T], for the first teacher token."""
    student_lengths: Tensor
    """int64 [U]: m, the number of student tokens, which are consecutive."""
    teacher_lengths: Tensor
    """int64 [U]: n, the number of teacher tokens."""

    def __len__(self) -> int:
        return len(self.student_rows)

    @property
    def have_several_tokens(self) -> Tensor:
        """bool [U]: several tokens on at least one side."""
        return compute_on_host(lambda m, n: [(m > 1) | (n > 1)], self.student_lengths, self.teacher_lengths)[0]

    def where(self, mask: Tensor) -> ChunkUnits:
        """Select units by a mask, bool [U], through `compute_on_host`."""

        def selected(mask: Tensor, *fields: Tensor) -> list[Tensor]:
            index = mask.nonzero().squeeze(1)
            return [field[index] for field in fields]

        fields = (self.student_rows, self.teacher_rows, self.student_lengths, self.teacher_lengths)
        return ChunkUnits(*compute_on_host(selected, mask, *fields))


def sampled_mask(mask: Tensor, sampled: SampledRows | None) -> Tensor:
    """Restrict a mask [B, S] to sampled sequences: bool [B, S], by `compute_on_host`; all false without samples."""
    if sampled is None:
        return compute_on_host(lambda mask: [torch.zeros_like(mask)], mask)[0]
    return compute_on_host(lambda mask, is_sampled: [mask & is_sampled.unsqueeze(1)], mask, sampled.is_sampled)[0]


def label_mask(batch: Batch) -> Tensor:
    """Return the scored tokens for cross-entropy, without sampled sequences: bool [B, S], through `compute_on_host`."""
    mask = batch.student.loss_mask
    if batch.sampled is None:
        return mask
    return compute_on_host(lambda mask, is_sampled: [mask & ~is_sampled.unsqueeze(1)], mask, batch.sampled.is_sampled)[
        0
    ]


def count_label_tokens(mask: Tensor) -> Tensor:
    """Count the scored tokens of a mask [B, S], the units of same_vocab and cross_entropy: int64 [B]. Skips token 0."""
    return (mask[:, 1:] != 0).sum(1)


def count_chunks(student_chunk_id: Tensor, teacher_chunk_id: Tensor) -> Tensor:
    """Count the units of cross-tokenizer losses in chunk ids [B, S] and [B, T]: int64 [B] (methods.md §5.1).

    A unit is a chunk present on both sides that contains token 0 of neither.
    """
    is_unit, _ = _first_positions(student_chunk_id, teacher_chunk_id)
    return is_unit.sum(1)


def label_rows(mask: Tensor) -> Tensor:
    """Return the logit rows that predict the scored tokens of a mask [B, S]: indices [U] into [B·S].

    Computed through `compute_on_host`, like all units in this file.
    """
    return compute_on_host(lambda mask: [_label_rows(mask)], mask)[0]


def next_tokens(values: Tensor, rows: Tensor) -> Tensor:
    """Return the values [U], from [B, S], of the tokens predicted by logit rows: indices [U] into [B·S]."""
    return values.flatten().index_select(0, rows + 1)


def _label_rows(mask: Tensor) -> Tensor:
    row, position = (mask[:, 1:] != 0).nonzero(as_tuple=True)
    return row * mask.shape[1] + position


def weighted_label_rows(mask: Tensor, sequence_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return `label_rows` of sequences with nonzero weight [B], and each row's weight [U] (None if all are 1)."""
    if sequence_weights is None:
        return label_rows(mask), None
    (rows,) = compute_on_host(lambda mask, w: [_label_rows(mask * (w != 0).unsqueeze(1))], mask, sequence_weights)
    return rows, sequence_weights.index_select(0, rows // mask.shape[1])


def chunk_units(student_chunk_id: Tensor, teacher_chunk_id: Tensor) -> ChunkUnits:
    """Return the units in chunk ids [B, S] and [B, T], through `compute_on_host`."""
    return ChunkUnits(*compute_on_host(_chunk_units, student_chunk_id, teacher_chunk_id))


def _chunk_units(student_chunk_id: Tensor, teacher_chunk_id: Tensor) -> list[Tensor]:
    is_unit, teacher_position = _first_positions(student_chunk_id, teacher_chunk_id)
    row, position = is_unit.nonzero(as_tuple=True)
    return [
        row * student_chunk_id.shape[1] + position - 1,
        row * teacher_chunk_id.shape[1] + teacher_position[row, position] - 1,
        _chunk_lengths(student_chunk_id, student_chunk_id)[row, position],
        _chunk_lengths(teacher_chunk_id, student_chunk_id)[row, position],
    ]


def _first_positions(student_chunk_id: Tensor, teacher_chunk_id: Tensor) -> tuple[Tensor, Tensor]:
    """Find the first tokens of units in chunk ids, which are −1 or non-decreasing.

    Returns a mask of units' first student tokens, bool [B, S], and the first teacher token's position, int64 [B, S],
    valid only at true entries of the mask.
    """
    check_same_length(student_chunk_id=student_chunk_id, teacher_chunk_id=teacher_chunk_id)
    student, teacher = student_chunk_id.long(), teacher_chunk_id.long()
    highest = torch.cat([student.new_full((len(student), 1), -1), student], 1).cummax(1).values[:, :-1]
    position = torch.searchsorted(teacher.cummax(1).values, student.contiguous())
    teacher_position = position.clamp(max=teacher.shape[1] - 1)
    is_unit = (student > highest) & (teacher.gather(1, teacher_position) == student) & (position > 0)
    is_unit[:, 0] = False
    return is_unit, teacher_position


def _chunk_lengths(chunk_id: Tensor, queries: Tensor) -> Tensor:
    """Count the tokens of queried chunks: ids [B, T], queries [B, S] → int64 [B, S]; meaningless for queries of −1."""
    highest, chunks = chunk_id.long().cummax(1).values, queries.long().contiguous()
    aligned_before = F.pad((chunk_id >= 0).cumsum(1), (1, 0))
    begin, end = torch.searchsorted(highest, chunks), torch.searchsorted(highest, chunks, right=True)
    return aligned_before.gather(1, end) - aligned_before.gather(1, begin)
