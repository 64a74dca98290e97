"""Arguments and positions of losses that compare both sides at every scored token of one tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Required, TypedDict

from torch import Tensor

from nemo_opd.distributed.transfer import planned
from nemo_opd.logits.read_ahead import ReadAhead
from nemo_opd.logits.rows import LogitRows, TrainableRows, check_shares, logit_rows, trainable_rows
from nemo_opd.losses.arguments import check_positions, check_sequence_weights, shared_columns
from nemo_opd.losses.reduction import weighted_label_rows
from nemo_opd.losses.truncated import require_whole


class TokenArguments(TypedDict, total=False):
    """Arguments that every loss of scored tokens takes after its logits [B, ≥ S, ≥ V] and [B, S, ≥ V], unshifted."""

    mask: Required[Tensor]
    """[B, S]: token i is scored, by the logits at i−1, so token 0 never counts."""
    sequence_weights: Tensor | None
    """[B]: factor of each sequence's tokens in the sum; those of weight 0 are left out. By default 1."""
    normalizer: float | None
    """Scored tokens of the global batch, by which the sum is divided; by default those of this call."""
    student_vocab_size: int | None
    """Leading columns that are the vocabulary, cut before any softmax; by default those of the narrower head."""
    teacher_vocab_size: int | None
    """The same number."""
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
    """V: leading columns of both heads that are the vocabulary."""
    rows: Tensor
    """int64 [U]: indices into [B·S], of sequences with a weight other than 0; the teacher's rows."""
    student_rows: Tensor
    """int64 [U]: the same of the student, which may have further positions."""
    sequences: Tensor
    """int64 [U]: the sequence b of each."""
    weights: Tensor | None
    """[U]: those of the sequences; None: all 1."""
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

        Raises ConfigError for shapes or sizes that do not fit, and for a truncated teacher unless it can be taken.
        """
        student, teacher = trainable_rows(student_logits), logit_rows(teacher_logits)
        if not takes_truncated:
            require_whole(teacher, "loss.type", "this loss needs the whole distribution")
        check_positions(teacher.shape, mask=mask)
        check_positions((student.shape[0], min(student.shape[1], mask.shape[1]), student.shape[2]), mask=mask)
        check_sequence_weights(sequence_weights, len(mask))
        check_shares(student, teacher)
        columns = teacher.shape[-1] - teacher.is_truncated
        size = shared_columns(student.shape[-1], columns, student_vocab_size, teacher_vocab_size)
        teacher = teacher.cut(size)
        rows, weights = weighted_label_rows(mask, sequence_weights)
        ours, theirs = student.shape[1], mask.shape[1]
        sequences, student_rows = planned(lambda rows: [rows // theirs, rows // theirs * ours + rows % theirs], rows)
        return LabelPositions(student, teacher, size, rows, student_rows, sequences, weights, normalizer, chunk_size)

    def __len__(self) -> int:
        return len(self.rows)

    def teacher_ahead(self) -> ReadAhead:
        """Return a reader of the teacher's logits, block by block: [u, V], [u, V + 1] of a truncated one."""
        return ReadAhead(self.teacher, self.rows, self.size + self.teacher.is_truncated)
