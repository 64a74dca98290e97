"""Units of losses, and their number (methods.md §7.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.distributed.transfer import planned
from nemo_opd.losses.arguments import check_same_length
from nemo_opd.types import Batch, SampledRows


@dataclass(frozen=True, slots=True)
class ChunkUnits:
    """Aligned chunks that have a predictor on both sides, each by the rows that predict its first tokens."""

    student_rows: Tensor
    """int64 [U]: indices into [B·S]."""
    teacher_rows: Tensor
    """int64 [U]: indices into [B·T]."""
    student_lengths: Tensor
    """int64 [U]: m, student tokens of the chunk, which follow one another."""
    teacher_lengths: Tensor
    """int64 [U]: n, teacher tokens."""

    def __len__(self) -> int:
        return len(self.student_rows)

    @property
    def have_several_tokens(self) -> Tensor:
        """bool [U]: on either side."""
        return planned(lambda m, n: [(m > 1) | (n > 1)], self.student_lengths, self.teacher_lengths)[0]

    def where(self, kept: Tensor) -> ChunkUnits:
        """Select the units for which bool [U] is true, as `planned`."""

        def selected(kept: Tensor, *fields: Tensor) -> list[Tensor]:
            index = kept.nonzero().squeeze(1)
            return [field[index] for field in fields]

        fields = (self.student_rows, self.teacher_rows, self.student_lengths, self.teacher_lengths)
        return ChunkUnits(*planned(selected, kept, *fields))


def sampled_mask(mask: Tensor, sampled: SampledRows | None) -> Tensor:
    """Return bool [B, S]: tokens of a mask that the student sampled, as `planned`. Nothing of validation was."""
    if sampled is None:
        return planned(lambda mask: [torch.zeros_like(mask)], mask)[0]
    return planned(lambda mask, is_sampled: [mask & is_sampled.unsqueeze(1)], mask, sampled.is_sampled)[0]


def label_mask(batch: Batch) -> Tensor:
    """Return bool [B, S]: scored tokens that cross-entropy learns, as `planned`; none that the student sampled."""
    mask = batch.student.loss_mask
    if batch.sampled is None:
        return mask
    return planned(lambda mask, is_sampled: [mask & ~is_sampled.unsqueeze(1)], mask, batch.sampled.is_sampled)[0]


def count_label_tokens(mask: Tensor) -> Tensor:
    """Count the scored tokens in a mask [B, S], units of same_vocab and cross_entropy: int64 [B]; never token 0."""
    return (mask[:, 1:] != 0).sum(1)


def count_chunks(student_chunk_id: Tensor, teacher_chunk_id: Tensor) -> Tensor:
    """Count the units of cross-tokenizer losses in chunk ids [B, S] and [B, T]: int64 [B] (methods.md §5.1).

    A unit is a chunk present on both sides that holds token 0 of neither.
    """
    is_unit, _ = _first_positions(student_chunk_id, teacher_chunk_id)
    return is_unit.sum(1)


def label_rows(mask: Tensor) -> Tensor:
    """Return the logit rows, as indices [U] into [B·S], that predict the scored tokens of a mask [B, S].

    As `planned`, like all units here.
    """
    return planned(lambda mask: [_label_rows(mask)], mask)[0]


def next_tokens(values: Tensor, rows: Tensor) -> Tensor:
    """Return the values [U], out of [B, S], of the tokens that logit rows predict: indices [U] into [B·S]."""
    return values.flatten().index_select(0, rows + 1)


def _label_rows(mask: Tensor) -> Tensor:
    row, position = (mask[:, 1:] != 0).nonzero(as_tuple=True)
    return row * mask.shape[1] + position


def weighted_label_rows(mask: Tensor, sequence_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return `label_rows` of sequences with a weight [B] other than 0, and the weights of the rows [U]; None: all 1."""
    if sequence_weights is None:
        return label_rows(mask), None
    (rows,) = planned(lambda mask, w: [_label_rows(mask * (w != 0).unsqueeze(1))], mask, sequence_weights)
    return rows, sequence_weights.index_select(0, rows // mask.shape[1])


def chunk_units(student_chunk_id: Tensor, teacher_chunk_id: Tensor) -> ChunkUnits:
    """Return the units in chunk ids [B, S] and [B, T], as `planned`."""
    return ChunkUnits(*planned(_chunk_units, student_chunk_id, teacher_chunk_id))


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
    """Find the first tokens of units: is_unit bool [B, S] at the student's, and int64 [B, S], the teacher's position.

    Chunk ids are −1 or non-decreasing. The second tensor means something only where the first is true.
    """
    check_same_length(student_chunk_id=student_chunk_id, teacher_chunk_id=teacher_chunk_id)
    student, teacher = student_chunk_id.long(), teacher_chunk_id.long()
    highest = torch.cat([student.new_full((len(student), 1), -1), student], 1).cummax(1).values[:, :-1]
    position = torch.searchsorted(teacher.cummax(1).values, student.contiguous())
    found = position.clamp(max=teacher.shape[1] - 1)
    is_unit = (student > highest) & (teacher.gather(1, found) == student) & (position > 0)
    is_unit[:, 0] = False
    return is_unit, found


def _chunk_lengths(chunk_id: Tensor, wanted: Tensor) -> Tensor:
    """Count the tokens of each wanted chunk: ids [B, T], chunks [B, S] → int64 [B, S]; meaningless where one is −1."""
    highest, chunks = chunk_id.long().cummax(1).values, wanted.long().contiguous()
    aligned_before = F.pad((chunk_id >= 0).cumsum(1), (1, 0))
    begin, end = torch.searchsorted(highest, chunks), torch.searchsorted(highest, chunks, right=True)
    return aligned_before.gather(1, end) - aligned_before.gather(1, begin)
