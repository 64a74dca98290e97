"""From a term of the config to the loss of one teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from nemo_opd.config.loss import LossTerm, PKLTerm, SameVocabTerm
from nemo_opd.errors import ConfigError
from nemo_opd.losses.p_kl import p_kl
from nemo_opd.losses.same_vocab import same_vocab
from nemo_opd.types import LossOutput, TeacherRows, TokenRows

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


class TermLoss(Protocol):
    """The loss of one teacher over a microbatch; normalizer: its units in the global batch."""

    def __call__(
        self,
        student_logits: Tensor,
        teacher_logits: Tensor,
        student: TokenRows,
        teacher: TeacherRows,
        normalizer: float | None,
    ) -> LossOutput: ...


def build(
    term: LossTerm,
    projection: ProjectionMatrix | None = None,
    *,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
) -> TermLoss:
    """The callable of a term. Sizes: of the tokenizers, where the heads are wider; see the losses for their defaults.

    Raises ConfigError where a cross-tokenizer term has no projection.
    """
    if isinstance(term, SameVocabTerm):
        return _same_vocab(term, student_vocab_size, teacher_vocab_size)
    if projection is None:
        raise ConfigError(f"loss.type={term.type} needs the projection of the teacher's tokenizer; give the matrix")
    return _p_kl(term, projection, student_vocab_size, teacher_vocab_size)


def _same_vocab(term: SameVocabTerm, student_vocab_size: int | None, teacher_vocab_size: int | None) -> TermLoss:
    def loss(
        student_logits: Tensor,
        teacher_logits: Tensor,
        student: TokenRows,
        teacher: TeacherRows,
        normalizer: float | None,
    ) -> LossOutput:
        return same_vocab(
            student_logits,
            teacher_logits,
            mask=student.loss_mask,
            divergence=term.divergence,
            temperature=term.temperature,
            beta=term.beta,
            mixed_weight=term.mixed_weight,
            normalizer=normalizer,
            student_vocab_size=student_vocab_size,
            teacher_vocab_size=teacher_vocab_size,
        )

    return loss


def _p_kl(
    term: PKLTerm, projection: ProjectionMatrix, student_vocab_size: int | None, teacher_vocab_size: int | None
) -> TermLoss:
    def loss(
        student_logits: Tensor,
        teacher_logits: Tensor,
        student: TokenRows,
        teacher: TeacherRows,
        normalizer: float | None,
    ) -> LossOutput:
        if teacher.chunks is None:
            raise ConfigError(
                "loss.type=p_kl compares aligned chunks, but the batch has none for this teacher; align it"
            )
        return p_kl(
            student_logits,
            teacher_logits,
            projection=projection,
            student_ids=student.ids,
            teacher_ids=teacher.tokens.ids,
            student_chunk_id=teacher.chunks.student,
            teacher_chunk_id=teacher.chunks.teacher,
            divergence=term.divergence,
            temperature=term.temperature,
            beta=term.beta,
            mixed_weight=term.mixed_weight,
            coverage_coef=term.coverage_coef,
            normalizer=normalizer,
            student_vocab_size=student_vocab_size,
            teacher_vocab_size=teacher_vocab_size,
        )

    return loss
