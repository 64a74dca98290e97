"""From a term of the config to the loss of one teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from nemo_opd.config.loss import LossTerm, Objective
from nemo_opd.errors import ConfigError
from nemo_opd.losses.alm import alm
from nemo_opd.losses.byte_prefix import byte_prefix
from nemo_opd.losses.gold import gold
from nemo_opd.losses.h_kl import h_kl
from nemo_opd.losses.logit_rows import LogitRows
from nemo_opd.losses.p_kl import p_kl
from nemo_opd.losses.planned import Loss, PlannedLoss
from nemo_opd.losses.reduction import count_chunks, count_label_tokens
from nemo_opd.losses.same_vocab import same_vocab
from nemo_opd.losses.shared_prefix import shared_prefix
from nemo_opd.losses.strict import strict, strict_units
from nemo_opd.losses.uld import uld
from nemo_opd.types import TeacherRows, TokenRows

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


Arguments = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class TermLoss:
    """The loss of one teacher over a microbatch."""

    plan_loss: Callable[..., PlannedLoss]
    """Everything but the batch is bound."""
    batch_arguments: Callable[[TokenRows, TeacherRows], Arguments]
    """What it reads of a batch besides the logits, by keyword."""
    count: Callable[[Arguments], int]
    """Its units among such arguments."""

    def num_units(self, student: TokenRows, teacher: TeacherRows) -> int:
        """What its normalizer counts, of these rows. Raises ConfigError for a batch without what is read."""
        return self.count(self.batch_arguments(student, teacher))

    def plan(
        self,
        student_logits: Tensor | LogitRows,
        teacher_logits: Tensor | LogitRows,
        student: TokenRows,
        teacher: TeacherRows,
        normalizer: float | None,
        *,
        sequence_weights: Tensor | None = None,
    ) -> PlannedLoss:
        """normalizer: the teacher's units in the global batch. Raises ConfigError for a batch without what is read."""
        arguments = self.batch_arguments(student, teacher)
        return self.plan_loss(
            student_logits, teacher_logits, normalizer=normalizer, sequence_weights=sequence_weights, **arguments
        )


def build(
    term: LossTerm,
    projection: ProjectionMatrix | None = None,
    *,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
) -> TermLoss:
    """The callable of a term, each setting of which is a keyword of its loss.

    Sizes: of the tokenizers, where the heads are wider; see the losses for their defaults. Raises ConfigError where a
    term has no projection and needs one.
    """
    kind = _KINDS[term.type]
    plan = partial(
        kind.loss.plan,
        **term.model_dump(exclude={"type", *Objective.model_fields}),
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=teacher_vocab_size,
    )
    count = kind.count
    if kind.needs_projection:
        if projection is None:
            raise ConfigError(f"loss.type={term.type} needs the projection of the teacher's tokenizer; give the matrix")
        plan = partial(plan, projection=projection)
        count = partial(count, projection=projection)
    return TermLoss(plan, partial(kind.batch_arguments, term.type), count)


@dataclass(frozen=True, slots=True)
class _Kind:
    loss: Loss[...]
    batch_arguments: Callable[[str, TokenRows, TeacherRows], Arguments]
    """The first argument is the term's type, for messages."""
    count: Callable[..., int]
    """Units among the batch's arguments, given the projection where one is needed."""
    needs_projection: bool = True


def _scored_tokens(type_: str, student: TokenRows, teacher: TeacherRows) -> Arguments:
    return {"mask": student.loss_mask}


def _aligned_chunks(type_: str, student: TokenRows, teacher: TeacherRows) -> Arguments:
    if teacher.chunks is None:
        raise ConfigError(
            f"loss.type={type_} compares aligned chunks, but the batch has none for this teacher; align it"
        )
    return {
        "student_ids": student.ids,
        "teacher_ids": teacher.tokens.ids,
        "student_chunk_id": teacher.chunks.student,
        "teacher_chunk_id": teacher.chunks.teacher,
    }


def _count_scored_tokens(arguments: Arguments) -> int:
    return count_label_tokens(arguments["mask"])


def _count_chunks(arguments: Arguments, projection: ProjectionMatrix | None = None) -> int:
    return count_chunks(arguments["student_chunk_id"], arguments["teacher_chunk_id"])


def _count_strict_units(arguments: Arguments, projection: ProjectionMatrix) -> int:
    return len(strict_units(**arguments, projection=projection))


_KINDS = {
    "same_vocab": _Kind(same_vocab, _scored_tokens, _count_scored_tokens, needs_projection=False),
    "p_kl": _Kind(p_kl, _aligned_chunks, _count_chunks),
    "gold": _Kind(gold, _aligned_chunks, _count_chunks),
    "h_kl": _Kind(h_kl, _aligned_chunks, _count_chunks),
    "strict": _Kind(strict, _aligned_chunks, _count_strict_units),
    "byte_prefix": _Kind(byte_prefix, _aligned_chunks, _count_chunks),
    "shared_prefix": _Kind(shared_prefix, _aligned_chunks, _count_chunks),
    "alm": _Kind(alm, _aligned_chunks, _count_chunks, needs_projection=False),
    "uld": _Kind(uld, _aligned_chunks, _count_chunks, needs_projection=False),
}
