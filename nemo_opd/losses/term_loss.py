"""Construction of teacher losses from configuration terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from nemo_opd.config.loss import (
    BytePrefixTerm,
    DivergenceKind,
    FunctionTerm,
    LossTerm,
    NormalizedTerm,
    StrictTerm,
    TCADTerm,
)
from nemo_opd.config.objective import Objective
from nemo_opd.config.settings import choices, require_lines
from nemo_opd.distributed.transfer import compute_on_host
from nemo_opd.errors import ConfigError
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.alm import alm
from nemo_opd.losses.arguments import ChunkUnits, chunk_starts, count_label_tokens, sampled_mask
from nemo_opd.losses.byte_prefix import byte_prefix
from nemo_opd.losses.chunk_loss import ChunkPositions
from nemo_opd.losses.divergence import DIVERGENCES
from nemo_opd.losses.escd import escd
from nemo_opd.losses.function import check_function, chunk_function, token_function
from nemo_opd.losses.gold import gold, h_kl
from nemo_opd.losses.p_kl import p_kl
from nemo_opd.losses.position_units import compared_positions
from nemo_opd.losses.same_vocab import same_vocab
from nemo_opd.losses.sampled_kl import sampled_chunk_kl, sampled_kl
from nemo_opd.losses.shared_prefix import shared_prefix
from nemo_opd.losses.strict import strict, strict_units
from nemo_opd.losses.tcad import tcad
from nemo_opd.losses.uld import uld
from nemo_opd.types import SampledRows, TeacherRows, TokenRows

if TYPE_CHECKING:
    from nemo_opd.losses.learned_projection import LearnedProjection
    from nemo_opd.projection import ProjectionMatrix

_Arguments = dict[str, Tensor]
_Unit = Literal["place", "sequence", "prompt"]
"""Kind of unit. place: scored token or aligned chunk; sequence: mean over its tokens; prompt: all rollouts of a prompt,
with weights that sum to 1.
"""
NOT_ARGUMENTS = {"type", "normalizer", "power_alpha", *Objective.model_fields}
"""Fields of a term or of its objective that are not keyword arguments of the loss."""


@dataclass(frozen=True, slots=True)
class TermLoss:
    """The loss of one teacher over a microbatch."""

    plan_loss: Callable[..., PlannedLoss]
    """The loss's `plan` with everything bound but the batch."""
    batch_arguments: Callable[[TokenRows, TeacherRows, SampledRows | None], _Arguments]
    """Keyword arguments that the loss reads from a batch, besides the logits."""
    compared: Callable[[_Arguments], Tensor]
    """Student tokens whose predictions are compared, one for each place: bool [B, S], from those arguments."""
    covered: Callable[[_Arguments], Tensor]
    """Student tokens in units: bool [B, S], from those arguments."""
    unit: _Unit
    is_per_token: bool = False
    """Whether the normalizer counts the scored tokens of texts with a unit, instead of units."""

    def units(self, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None = None) -> Tensor:
        """Count the units of each sequence: int64 [B]. Raises ConfigError if the batch lacks an input of the loss."""
        places = self.positions(student, teacher, sampled).sum(1)
        return places if self.unit == "place" else (places > 0).long()

    def positions(self, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None = None) -> Tensor:
        """Return the student tokens whose predictions are compared: bool [B, S]. Raises as `units`."""
        return self.compared(self.batch_arguments(student, teacher, sampled))

    def count(self, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None = None) -> float:
        """Return these rows' share of the normalizer: units, or tokens if `is_per_token`, times rollout weights.

        Raises as `units`.
        """
        units = self.units(student, teacher, sampled)
        if self.is_per_token:
            units = count_label_tokens(student.loss_mask) * (units > 0)
        if teacher.rollout_weights is None:
            return int(units.sum())
        return float((units * teacher.rollout_weights.double()).sum())

    def num_covered(self, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None = None) -> Tensor:
        """Count the student's scored tokens in units: int64 [B]. Raises as `units`."""
        return self.covered(self.batch_arguments(student, teacher, sampled)).sum(1)

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
        """Plan the loss. normalizer: `count` of the global batch. Raises ConfigError for missing inputs."""
        arguments = self.batch_arguments(student, teacher, sampled)
        return self.plan_loss(
            student_logits, teacher_logits, normalizer=normalizer, sequence_weights=sequence_weights, **arguments
        )


def build(
    term: LossTerm,
    projection: ProjectionMatrix | LearnedProjection | None = None,
    *,
    across_tokenizers: bool = False,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
) -> TermLoss:
    """Build the loss of a term; its settings become keyword arguments of the loss function.

    across_tokenizers: whether the teacher has another tokenizer; decides for terms that support both. Vocabulary
    sizes: the tokenizers', needed if heads are wider; each loss documents its default. Raises ConfigError if a
    required projection is missing or a user's function cannot be called.
    """
    entry = (ACROSS_TOKENIZERS if across_tokenizers else LOSSES)[term.type]
    if isinstance(term, FunctionTerm):
        check_function(term.function, term.arguments)
    plan = partial(
        entry.loss.plan,
        **term.model_dump(exclude=NOT_ARGUMENTS),
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=teacher_vocab_size,
    )
    compared, covered = entry.units.compared, entry.units.covered
    if entry.needs_projection:
        if projection is None:
            raise ConfigError(f"loss.type={term.type} needs the projection of the teacher's tokenizer; give the matrix")
        plan = partial(plan, projection=projection)
    if isinstance(term, StrictTerm):
        strict_settings: dict[str, Any] = {"projection": projection, "has_continuation": term.continuation_weight > 0}
        units = partial(strict_units, **strict_settings)
        compared, covered = partial(_strict_starts, units), partial(_in_strict_chunks, units)
    if isinstance(term, BytePrefixTerm) and term.positions == "all":
        piece_settings: dict[str, Any] = {"projection": projection, "pieces": term.pieces}
        compared = covered = partial(_compared_positions, **piece_settings)
    unit: _Unit = "place"
    if isinstance(term, TCADTerm):
        unit = "sequence" if term.power_alpha is None else "prompt"
    is_per_token = isinstance(term, NormalizedTerm) and term.normalizer == "student_tokens"
    return TermLoss(plan, partial(entry.units.arguments, term.type), compared, covered, unit, is_per_token)


def _scored_tokens(type_: str, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None) -> _Arguments:
    return {"mask": student.loss_mask}


def _scored_tokens_with_ids(
    type_: str, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None
) -> _Arguments:
    return {"ids": student.ids, "mask": student.loss_mask}


def _sampled_tokens(type_: str, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None) -> _Arguments:
    mask = sampled_mask(student.loss_mask, sampled)
    return {"ids": student.ids, "mask": mask, **_logprobs(student, sampled)}


def _aligned_chunks(type_: str, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None) -> _Arguments:
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


def _sampled_chunks(type_: str, student: TokenRows, teacher: TeacherRows, sampled: SampledRows | None) -> _Arguments:
    aligned, mask = _aligned_chunks(type_, student, teacher, sampled), sampled_mask(student.loss_mask, sampled)
    return aligned | {
        "student_chunk_id": _sampled_chunk_ids(aligned["student_chunk_id"], sampled),
        "mask": mask,
        **_logprobs(student, sampled),
    }


def _sampled_chunk_ids(chunks: Tensor, sampled: SampledRows | None) -> Tensor:
    """Set chunk ids [B, S] to −1 in sequences that the student did not sample."""
    if sampled is None:
        return compute_on_host(lambda chunks: [torch.full_like(chunks, -1)], chunks)[0]
    (chunks,) = compute_on_host(
        lambda ids, is_sampled: [ids.where(is_sampled.unsqueeze(1), -1)], chunks, sampled.is_sampled
    )
    return chunks


def _logprobs(student: TokenRows, sampled: SampledRows | None) -> _Arguments:
    """Return the engine's log-probabilities of the samples; empty in validation."""
    if sampled is None:
        return {}
    width = student.ids.shape[1]
    return {
        "logprobs": sampled.logprobs[:, :width],
        "behaviour_logprobs": sampled.behaviour_logprobs[:, :width],
    }


def _scored(arguments: _Arguments) -> Tensor:
    is_scored = arguments["mask"] != 0
    is_scored[:, 0] = False
    return is_scored


def _chunk_starts(arguments: _Arguments) -> Tensor:
    is_start, _ = chunk_starts(arguments["student_chunk_id"], arguments["teacher_chunk_id"])
    return is_start


def _in_chunks(arguments: _Arguments) -> Tensor:
    student, teacher = arguments["student_chunk_id"], arguments["teacher_chunk_id"]
    has_no_predictor = (student == student[:, :1]) | (student == teacher[:, :1])
    return (student >= 0) & ~has_no_predictor


def _strict_starts(units_of: Callable[..., ChunkUnits], arguments: _Arguments) -> Tensor:
    return _at_tokens(units_of(**arguments).student_rows + 1, arguments["student_ids"])


def _in_strict_chunks(units_of: Callable[..., ChunkUnits], arguments: _Arguments) -> Tensor:
    units = units_of(**arguments)
    tokens = ChunkPositions.of(units.student_rows, units.student_lengths).rows + 1
    return _at_tokens(tokens, arguments["student_ids"])


def _at_tokens(index: Tensor, ids: Tensor) -> Tensor:
    """Return which tokens of ids [B, S] an index into [B·S] selects: bool [B, S]."""
    return torch.zeros(ids.numel(), dtype=torch.bool, device=index.device).index_fill(0, index, True).view_as(ids)


def _compared_positions(arguments: _Arguments, projection: ProjectionMatrix, *, pieces: str) -> Tensor:
    return compared_positions(**arguments, projection=projection, pieces=pieces)


@dataclass(frozen=True, slots=True)
class _Units:
    """Reader of a loss's arguments and finder of its units."""

    arguments: Callable[[str, TokenRows, TeacherRows, SampledRows | None], _Arguments]
    """Keyword arguments of the loss from a batch. The first parameter is the term's type, for error messages."""
    compared: Callable[..., Tensor]
    """Student tokens whose predictions are compared, bool [B, S], from those arguments, unless `build` replaces it."""
    covered: Callable[..., Tensor]
    """Student tokens in units: bool [B, S]."""


@dataclass(frozen=True, slots=True)
class _Entry:
    loss: Loss[...]
    units: _Units
    needs_projection: bool = False


_TOKENS = _Units(_scored_tokens, _scored, _scored)
_SAMPLED_TOKENS = _Units(_sampled_tokens, _scored, _scored)
_CHUNKS = _Units(_aligned_chunks, _chunk_starts, _in_chunks)
_SAMPLED_CHUNKS = _Units(_sampled_chunks, _chunk_starts, _in_chunks)

LOSSES = {
    "same_vocab": _Entry(same_vocab, _TOKENS),
    "tcad": _Entry(tcad, _TOKENS),
    "sampled_kl": _Entry(sampled_kl, _SAMPLED_TOKENS),
    "p_kl": _Entry(p_kl, _CHUNKS, needs_projection=True),
    "gold": _Entry(gold, _CHUNKS, needs_projection=True),
    "h_kl": _Entry(h_kl, _CHUNKS, needs_projection=True),
    "strict": _Entry(strict, _CHUNKS, needs_projection=True),
    "byte_prefix": _Entry(byte_prefix, _CHUNKS, needs_projection=True),
    "shared_prefix": _Entry(shared_prefix, _CHUNKS, needs_projection=True),
    "escd": _Entry(escd, _CHUNKS, needs_projection=True),
    "alm": _Entry(alm, _CHUNKS),
    "uld": _Entry(uld, _CHUNKS),
    "function": _Entry(token_function, replace(_TOKENS, arguments=_scored_tokens_with_ids)),
}
"""Losses keyed by term `type`. A new loss is its file, its settings in config/, and a line here."""
ACROSS_TOKENIZERS = LOSSES | {
    "sampled_kl": _Entry(sampled_chunk_kl, _SAMPLED_CHUNKS),
    "function": _Entry(chunk_function, _CHUNKS, needs_projection=True),
}
"""Losses for teachers with another tokenizer."""
_TYPES = [str(term.model_fields["type"].default) for term in choices(LossTerm)]
require_lines(_TYPES, LOSSES, "LOSSES in nemo_opd/losses/term_loss.py")
require_lines(get_args(DivergenceKind), DIVERGENCES, "DIVERGENCES in nemo_opd/losses/divergence.py")
