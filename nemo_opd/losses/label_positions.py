"""Arguments and positions of losses at every scored token, for teachers with the student's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Required, TypedDict

from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host
from nemo_opd.logits.read_ahead import ReadAhead
from nemo_opd.logits.rows import LogitRows, TrainableRows, check_shares, logit_rows, trainable_rows
from nemo_opd.losses.arguments import check_positions, check_sequence_weights, shared_columns
from nemo_opd.losses.reduction import weighted_label_rows
from nemo_opd.losses.truncated import require_whole


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
        columns = teacher.shape[-1] - teacher.is_truncated
        size = shared_columns(student.shape[-1], columns, student_vocab_size, teacher_vocab_size)
        teacher = teacher.cut(size)
        rows, weights = weighted_label_rows(mask, sequence_weights)
        student_width, width = student.shape[1], mask.shape[1]
        sequences, student_rows = compute_on_host(
            lambda rows: [rows // width, rows // width * student_width + rows % width], rows
        )
        return LabelPositions(student, teacher, size, rows, student_rows, sequences, weights, normalizer, chunk_size)

    def __len__(self) -> int:
        return len(self.rows)

    def teacher_ahead(self) -> ReadAhead:
        """Return a block-by-block reader of the teacher's logits: [u, V], or [u, V + 1] if truncated."""
        return ReadAhead(self.teacher, self.rows, self.size + self.teacher.is_truncated)
