"""From a term of the config to the loss of one teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from nemo_opd.config.loss import LossTerm, Objective, StrictTerm, TCADTerm
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
from nemo_opd.losses.sampled_chunk_kl import sampled_chunk_kl
from nemo_opd.losses.sampled_kl import sampled_kl
from nemo_opd.losses.shared_prefix import shared_prefix
from nemo_opd.losses.strict import strict, strict_units
from nemo_opd.losses.tcad import tcad
from nemo_opd.losses.uld import uld
from nemo_opd.types import SampledRows, TeacherRows, TokenRows

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

Arguments = dict[str, Tensor]
Unit = Literal["place", "sequence", "prompt"]
"""What a loss is a mean of: scored tokens or aligned chunks, which count alike; sequences, each with a mean over its
tokens; or prompts, whose sequences have weights that add up to 1.
"""
OF_THE_DRIVER = frozenset({"type", "power_alpha", *Objective.model_fields})
"""Settings of a term, or of an objective around it, that are no arguments of its loss."""


@dataclass(frozen=True, slots=True)
class TermLoss:
    """The loss of one teacher over a microbatch."""

    plan_loss: Callable[..., PlannedLoss]
    """Everything but the batch is bound."""
    batch_arguments: Callable[[TokenRows, TeacherRows, SampledRows | None], Arguments]
    """What it reads of a batch besides the logits, by keyword."""
    count: Callable[[Arguments], Tensor]
    """Its units among such arguments, int64 [B]."""
    unit: Unit

    def num_texts(self, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None = None) -> int:
        """Those of these rows that have a unit."""
        return int((self.count(self.batch_arguments(student, teacher, sampled)) > 0).sum())

    def num_units(self, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None = None) -> float:
        """What its normalizer counts, of these rows: units, those of a sequence times its rollout weight.

        Raises ConfigError for a batch without what is read.
        """
        units = self.count(self.batch_arguments(student, teacher, sampled))
        if teacher.rollout_weights is None:
            return int(units.sum())
        return float((units * teacher.rollout_weights.double()).sum())

    def plan(
        self,
        student_logits: Tensor | LogitRows,
        teacher_logits: Tensor | LogitRows,
        student: TokenRows,
        teacher: TeacherRows,
        normalizer: float | None,
        *,
        sampled: SampledRows | None = None,
        sequence_weights: Tensor | None = None,
    ) -> PlannedLoss:
        """normalizer: the teacher's units in the global batch. Raises ConfigError for a batch without what is read."""
        arguments = self.batch_arguments(student, teacher, sampled)
        return self.plan_loss(
            student_logits, teacher_logits, normalizer=normalizer, sequence_weights=sequence_weights, **arguments
        )


def build(
    term: LossTerm,
    projection: ProjectionMatrix | None = None,
    *,
    across_tokenizers: bool = False,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
) -> TermLoss:
    """The callable of a term, each setting of which is a keyword of its loss.

    across_tokenizers: the teacher has its own, which matters to a term that takes either kind. Sizes: of the
    tokenizers, where the heads are wider; see the losses for their defaults. Raises ConfigError where a term has no
    projection and needs one.
    """
    kind = (_KINDS_ACROSS if across_tokenizers else _KINDS)[term.type]
    plan = partial(
        kind.loss.plan,
        **term.model_dump(exclude=set(OF_THE_DRIVER)),
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=teacher_vocab_size,
    )
    count = kind.count
    if kind.needs_projection:
        if projection is None:
            raise ConfigError(f"loss.type={term.type} needs the projection of the teacher's tokenizer; give the matrix")
        plan = partial(plan, projection=projection)
        count = partial(count, projection=projection)
    if isinstance(term, StrictTerm):
        count = partial(count, has_continuation=term.continuation_weight > 0)
    is_weighted = isinstance(term, TCADTerm) and term.power_alpha is not None
    return TermLoss(plan, partial(kind.batch_arguments, term.type), count, "prompt" if is_weighted else kind.unit)


@dataclass(frozen=True, slots=True)
class _Kind:
    loss: Loss[...]
    batch_arguments: Callable[[str, TokenRows, TeacherRows, SampledRows | None], Arguments]
    """The first argument is the term's type, for messages."""
    count: Callable[..., Tensor]
    """Units among the batch's arguments, int64 [B], given the projection where one is needed."""
    needs_projection: bool = True
    unit: Unit = "place"


def _scored_tokens(type_: str, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None) -> Arguments:
    return {"mask": student.loss_mask}


def _sampled_tokens(type_: str, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None) -> Arguments:
    is_sampled, logprobs = _of_samples(student, sampled)
    return {"ids": student.ids, "mask": student.loss_mask & is_sampled, **logprobs}


def _aligned_chunks(type_: str, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None) -> Arguments:
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


def _sampled_chunks(type_: str, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None) -> Arguments:
    is_sampled, logprobs = _of_samples(student, sampled)
    aligned = _aligned_chunks(type_, student, teacher, sampled)
    chunks = aligned["student_chunk_id"].where(is_sampled, -1)
    return aligned | {"student_chunk_id": chunks, "mask": student.loss_mask & is_sampled, **logprobs}


def _of_samples(student: TokenRows, sampled: SampledRows | None) -> tuple[Tensor, Arguments]:
    """Which sequences were sampled, bool [B, 1], and what the engine said of them. None of those of validation were."""
    if sampled is None:
        return torch.zeros_like(student.loss_mask[:, :1]), {}
    width = student.ids.shape[1]
    return sampled.is_sampled.unsqueeze(1), {
        "logprobs": sampled.logprobs[:, :width],
        "behaviour_logprobs": sampled.behaviour_logprobs[:, :width],
    }


def _count_scored_tokens(arguments: Arguments) -> Tensor:
    return count_label_tokens(arguments["mask"])


def _count_scored_sequences(arguments: Arguments) -> Tensor:
    return (_count_scored_tokens(arguments) > 0).long()


def _count_chunks(arguments: Arguments, projection: ProjectionMatrix | None = None) -> Tensor:
    return count_chunks(arguments["student_chunk_id"], arguments["teacher_chunk_id"])


def _count_strict_units(
    arguments: Arguments, projection: ProjectionMatrix, *, has_continuation: bool = False
) -> Tensor:
    num_rows, width = arguments["student_ids"].shape
    units = strict_units(**arguments, projection=projection, has_continuation=has_continuation)
    return torch.bincount(units.student_rows // width, minlength=num_rows)


_KINDS = {
    "same_vocab": _Kind(same_vocab, _scored_tokens, _count_scored_tokens, needs_projection=False),
    "tcad": _Kind(tcad, _scored_tokens, _count_scored_sequences, needs_projection=False, unit="sequence"),
    "sampled_kl": _Kind(sampled_kl, _sampled_tokens, _count_scored_tokens, needs_projection=False),
    "p_kl": _Kind(p_kl, _aligned_chunks, _count_chunks),
    "gold": _Kind(gold, _aligned_chunks, _count_chunks),
    "h_kl": _Kind(h_kl, _aligned_chunks, _count_chunks),
    "strict": _Kind(strict, _aligned_chunks, _count_strict_units),
    "byte_prefix": _Kind(byte_prefix, _aligned_chunks, _count_chunks),
    "shared_prefix": _Kind(shared_prefix, _aligned_chunks, _count_chunks),
    "alm": _Kind(alm, _aligned_chunks, _count_chunks, needs_projection=False),
    "uld": _Kind(uld, _aligned_chunks, _count_chunks, needs_projection=False),
}
_KINDS_ACROSS = _KINDS | {"sampled_kl": _Kind(sampled_chunk_kl, _sampled_chunks, _count_chunks, needs_projection=False)}
"""The same for a teacher with another tokenizer."""
