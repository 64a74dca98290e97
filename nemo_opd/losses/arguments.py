"""Units of losses: the scored tokens and chunks of a batch, and the rows of logits that predict them (methods.md §5.1).

Also checks of the losses' arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Required, TypedDict, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host
from nemo_opd.errors import ConfigError
from nemo_opd.logits.rows import LogitRows, TrainableRows, check_shares, logit_rows, trainable_rows
from nemo_opd.logits.term import ReadAhead
from nemo_opd.losses.support import require_whole
from nemo_opd.types import Batch, SampledRows


def check_temperature(temperature: float) -> None:
    """Raise ConfigError unless the temperature is above 0."""
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} cannot divide logits; give a number above 0")


def over(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by the temperature. Returns the same tensor at 1."""
    return logits if temperature == 1 else logits / temperature


def check_positions(logits_shape: Sequence[int], **tensors: Tensor | None) -> None:
    """Raise ConfigError if a tensor is not [B, S] for logits of shape [B, S, V]."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != tuple(logits_shape[:2]):
            raise ConfigError(
                f"{name} has shape {list(tensor.shape)}, its logits {list(logits_shape)}; "
                f"give one entry per position: {list(logits_shape[:2])}"
            )


def check_sequence_weights(weights: Tensor | None, num_sequences: int) -> None:
    """Raise ConfigError unless weights are [B]."""
    if weights is not None and tuple(weights.shape) != (num_sequences,):
        raise ConfigError(
            f"sequence_weights has shape {list(weights.shape)} for {num_sequences} sequences; "
            f"give one weight each: [{num_sequences}]"
        )


def own_columns(key: str, vocab_size: int | None, default: int, num_columns: int) -> int:
    """Return the vocabulary size, by default `default`. Raises ConfigError unless it is in [1, num_columns]."""
    size = default if vocab_size is None else vocab_size
    if not 0 < size <= num_columns:
        raise ConfigError(
            f"{key}={size}: the logits have {num_columns} columns; "
            "give the size of the model's own vocabulary, or resize its head to the tokenizer"
        )
    return size


_Value = TypeVar("_Value")


def check_compat(compat: str | None, systems: Sequence[str]) -> None:
    """Raise ConfigError for a system without a preset for this loss."""
    if compat is not None and compat not in systems:
        raise ConfigError(f"compat={compat!r}: this loss has no such preset; choose from {', '.join(systems)}, or None")


def fixed_by(compat: str | None, key: str, value: _Value | None, preset: _Value, default: _Value) -> _Value:
    """Return the preset's value if `compat` is set, else `value`, else the default.

    Raises ConfigError if `value` differs from the preset's.
    """
    if compat is None:
        return default if value is None else value
    if value is not None and value != preset:
        raise ConfigError(f"{key}={value} contradicts compat={compat}, which uses {preset}; leave {key} out, or compat")
    return preset


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
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The fields, to pass through `compute_on_host`."""
        return self.student_rows, self.teacher_rows, self.student_lengths, self.teacher_lengths

    @property
    def have_several_tokens(self) -> Tensor:
        """bool [U]: several tokens on at least one side."""
        return compute_on_host(lambda m, n: [(m > 1) | (n > 1)], self.student_lengths, self.teacher_lengths)[0]

    def where(self, mask: Tensor) -> ChunkUnits:
        """Select units by a mask, bool [U], through `compute_on_host`."""

        def selected(mask: Tensor, *fields: Tensor) -> list[Tensor]:
            index = mask.nonzero().squeeze(1)
            return [field[index] for field in fields]

        return ChunkUnits(*compute_on_host(selected, mask, *self.tensors))


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
    is_sampled = batch.sampled.is_sampled
    return compute_on_host(lambda mask, is_sampled: [mask & ~is_sampled.unsqueeze(1)], mask, is_sampled)[0]


def count_label_tokens(mask: Tensor) -> Tensor:
    """Count the scored tokens of a mask [B, S], the units of same_vocab and cross_entropy: int64 [B]. Skips token 0."""
    return (mask[:, 1:] != 0).sum(1)


def label_rows(mask: Tensor) -> Tensor:
    """Return the logit rows that predict the scored tokens of a mask [B, S]: indices [U] into [B·S].

    Computed through `compute_on_host`, like all units in this file.
    """
    return compute_on_host(_label_rows, mask)[0]


def next_tokens(values: Tensor, rows: Tensor) -> Tensor:
    """Return the values [U], from [B, S], of the tokens predicted by logit rows: indices [U] into [B·S]."""
    return values.flatten().index_select(0, rows + 1)


def _label_rows(mask: Tensor, sequence_weights: Tensor | None = None) -> list[Tensor]:
    mask = mask if sequence_weights is None else mask * (sequence_weights != 0).unsqueeze(1)
    row, position = (mask[:, 1:] != 0).nonzero(as_tuple=True)
    return [row * mask.shape[1] + position]


def chunk_units(student_chunk_id: Tensor, teacher_chunk_id: Tensor) -> ChunkUnits:
    """Return the units in chunk ids [B, S] and [B, T], with the row before each chunk, through `compute_on_host`."""
    return ChunkUnits(*compute_on_host(_chunk_units, student_chunk_id, teacher_chunk_id))


def _chunk_units(student_chunk_id: Tensor, teacher_chunk_id: Tensor) -> list[Tensor]:
    is_unit, teacher_position = chunk_starts(student_chunk_id, teacher_chunk_id)
    row, position = is_unit.nonzero(as_tuple=True)
    return [
        row * student_chunk_id.shape[1] + position - 1,
        row * teacher_chunk_id.shape[1] + teacher_position[row, position] - 1,
        chunk_lengths(student_chunk_id, student_chunk_id)[row, position],
        chunk_lengths(teacher_chunk_id, student_chunk_id)[row, position],
    ]


def chunk_starts(student_chunk_id: Tensor, teacher_chunk_id: Tensor) -> tuple[Tensor, Tensor]:
    """Find the first tokens of units in chunk ids, which are −1 or non-decreasing (methods.md §5.1).

    A unit is a chunk present on both sides that contains token 0 of neither. Returns a mask of units' first student
    tokens, bool [B, S], and the first teacher token's position, int64 [B, S], valid only at true entries of the mask.
    """
    if len(student_chunk_id) != len(teacher_chunk_id):
        raise ConfigError(
            f"numbers of sequences differ (student {len(student_chunk_id)}, teacher {len(teacher_chunk_id)}); "
            "row b must be the same text on both sides"
        )
    student, teacher = student_chunk_id.long(), teacher_chunk_id.long()
    highest = torch.cat([student.new_full((len(student), 1), -1), student], 1).cummax(1).values[:, :-1]
    position = torch.searchsorted(teacher.cummax(1).values, student.contiguous())
    teacher_position = position.clamp(max=teacher.shape[1] - 1)
    is_unit = (student > highest) & (teacher.gather(1, teacher_position) == student) & (position > 0)
    is_unit[:, 0] = False
    return is_unit, teacher_position


def chunk_lengths(chunk_id: Tensor, queries: Tensor) -> Tensor:
    """Count the tokens of queried chunks: ids [B, T], queries [B, S] → int64 [B, S]; meaningless for queries of −1."""
    highest, chunks = chunk_id.long().cummax(1).values, queries.long().contiguous()
    aligned_before = F.pad((chunk_id >= 0).cumsum(1), (1, 0))
    begin, end = torch.searchsorted(highest, chunks), torch.searchsorted(highest, chunks, right=True)
    return aligned_before.gather(1, end) - aligned_before.gather(1, begin)


class TokenArguments(TypedDict, total=False):
    """Arguments of every token loss besides its unshifted logits [B, ≥ S, ≥ V] and [B, S, ≥ V]."""

    mask: Required[Tensor]
    """[B, S]: token i is scored by the logits at i−1, so token 0 never counts."""
    sequence_weights: Tensor | None
    """[B]: weight of each sequence's tokens, by default 1. Sequences of weight 0 are skipped."""
    normalizer: float | None
    """Divisor of the sum: scored tokens of the global batch; by default the scored tokens of this call."""
    student_vocab_size: int | None
    """Vocabulary size to which logits are cut before any softmax; by default the width of the narrower head."""
    teacher_vocab_size: int | None
    """Must equal `student_vocab_size` if both are set."""
    chunk_size: int | None
    """Positions computed at a time; by default as many as fit a byte budget."""


@dataclass(frozen=True, slots=True)
class LabelPositions:
    """The logit rows of student and teacher that predict the scored tokens."""

    student: TrainableRows
    """[B, ≥ S, ≥ V]"""
    teacher: LogitRows
    """[B, S, ≥ V]"""
    size: int
    """V: leading columns of both heads that belong to the vocabulary."""
    rows: Tensor
    """int64 [U]: the teacher's rows, indices into [B·S], of sequences with nonzero weight."""
    student_rows: Tensor
    """int64 [U]: the student's rows; its logits may have more positions."""
    sequences: Tensor
    """int64 [U]: each token's sequence b."""
    weights: Tensor | None
    """Each token's sequence weight [U], or None if all are 1."""
    normalizer: float | None
    chunk_size: int | None

    @staticmethod
    def of(
        student_logits: Tensor | LogitRows,
        teacher_logits: Tensor | LogitRows,
        *,
        mask: Tensor,
        sequence_weights: Tensor | None = None,
        normalizer: float | None = None,
        student_vocab_size: int | None = None,
        teacher_vocab_size: int | None = None,
        chunk_size: int | None = None,
        takes_truncated: bool = False,
    ) -> LabelPositions:
        """Find the scored tokens in a mask [B, S].

        Raises ConfigError for shapes or sizes that do not fit, or a truncated teacher unless `takes_truncated`.
        """
        student, teacher = trainable_rows(student_logits), logit_rows(teacher_logits)
        if not takes_truncated:
            require_whole(teacher, "loss.type", "this loss needs the whole distribution")
        check_positions(teacher.shape, mask=mask)
        check_positions((student.shape[0], min(student.shape[1], mask.shape[1]), student.shape[2]), mask=mask)
        check_sequence_weights(sequence_weights, len(mask))
        check_shares(student, teacher)
        if None not in (student_vocab_size, teacher_vocab_size) and student_vocab_size != teacher_vocab_size:
            raise ConfigError(
                f"student_vocab_size={student_vocab_size} and teacher_vocab_size={teacher_vocab_size} differ, "
                "but this loss compares columns one to one; use a cross-tokenizer loss such as p_kl"
            )
        vocab_size = teacher_vocab_size if student_vocab_size is None else student_vocab_size
        student_columns, teacher_columns = student.shape[-1], teacher.shape[-1] - teacher.is_truncated
        narrower = min(student_columns, teacher_columns)
        own_columns("student_vocab_size", vocab_size, narrower, student_columns)
        size = own_columns("teacher_vocab_size", vocab_size, narrower, teacher_columns)
        (rows,) = compute_on_host(_label_rows, mask, *([] if sequence_weights is None else [sequence_weights]))
        student_width, width = student.shape[1], mask.shape[1]
        sequences, student_rows = compute_on_host(
            lambda rows: [rows // width, rows // width * student_width + rows % width], rows
        )
        weights = None if sequence_weights is None else sequence_weights.index_select(0, sequences)
        return LabelPositions(
            student, teacher.cut(size), size, rows, student_rows, sequences, weights, normalizer, chunk_size
        )

    def __len__(self) -> int:
        return len(self.rows)

    def teacher_ahead(self) -> ReadAhead:
        """Return a block-by-block reader of the teacher's logits: [u, V], or [u, V + 1] if truncated."""
        return ReadAhead(self.teacher, self.rows, self.size + self.teacher.is_truncated)
