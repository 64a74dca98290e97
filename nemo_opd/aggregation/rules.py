"""The rule of each aggregation type (methods.md §6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_opd.aggregation.scores import bits_per_byte, mean_logprob, score_tensors
from nemo_opd.config.base import choices, require_lines
from nemo_opd.config.objective import (
    Aggregation,
    AggregationBase,
    AveragedLogits,
    Routed,
    Score,
    SelectTeacher,
    WeightedSum,
)
from nemo_opd.data.collate import mask_unrouted
from nemo_opd.losses.policy_gradient import confidence_weights
from nemo_opd.types import Batch, SequenceScores, TeacherRows


def select_teacher(scores: Sequence[SequenceScores], *, per: Literal["sequence", "batch"]) -> Tensor:
    """Return the index of the teacher with the fewest bits per byte, int64 [B], per sequence or for the whole batch.

    Ties go to the first teacher; a teacher without a scored byte comes last (methods.md §6.3).
    """
    if per == "sequence":
        return bits_per_byte(scores).argmin(0)
    totals = [SequenceScores(*(tensor.sum(0, keepdim=True) for tensor in score_tensors(score))) for score in scores]
    return bits_per_byte(totals).argmin(0).expand(len(scores[0].bits))


def teacher_weights(settings: WeightedSum, weights: Sequence[float], vocab_sizes: Sequence[int]) -> list[float]:
    """Return the sequence-independent factor of each teacher's loss (methods.md §6.1).

    It is the teacher's weight, or 1 with weights per sequence, which already include it. Vocabulary scaling multiplies
    it by log W_i / log min_j W_j, so that a divergence over more tokens counts for more.
    """
    factors = list(weights) if settings.score is None else [1.0] * len(weights)
    if not settings.vocabulary_scaling:
        return factors
    smallest = math.log(min(vocab_sizes))
    return [factor * math.log(size) / smallest for factor, size in zip(factors, vocab_sizes, strict=True)]


def weighted(batch: Batch, weights_IB: Tensor) -> Batch:
    """Set each teacher's sequence weights, [teachers, B], in the batch."""
    pairs = zip(batch.teachers, weights_IB, strict=True)
    return replace(batch, teachers=tuple(replace(teacher, weights=weights) for teacher, weights in pairs))


def sequence_weights(
    scores: Sequence[SequenceScores], *, score: Score, alpha: float, priors: Sequence[float]
) -> Tensor:
    """Compute softmax_i(alpha · score_i + log prior_i) per sequence: float32 [teachers, B], detached (methods.md §6.1).

    score_i is −bits per byte, −entropy in bits per byte, or the largest probability per byte: 2^(−its bits per byte),
    the geometric mean over bytes. priors: one per teacher, above 0; with equal scores the weights are proportional to
    them. A teacher without a scored byte in a sequence gets weight 0; if all lack one, only the priors count. A NaN
    score gives its teacher a weight of NaN and does not affect the other teachers: the metrics then name the teacher,
    and the step is skipped (methods.md §12).
    """
    bits = bits_per_byte(scores)
    score_IB = torch.exp2(-bits) if score == "max_probability" else -bits
    log_prior_I1 = torch.tensor(priors, dtype=bits.dtype).log().unsqueeze(1)
    has_bytes = bits.isfinite()
    weights = (alpha * score_IB + log_prior_I1).masked_fill(~has_bytes, -torch.inf).softmax(0)
    weights = torch.where(has_bytes.any(0), weights, log_prior_I1.softmax(0))
    return weights.masked_fill(bits.isnan(), torch.nan).float()


def weighted_by_confidence(
    batch: Batch, scores: Sequence[SequenceScores | None], alphas: Sequence[float | None]
) -> Batch:
    """Add rollout weights for each teacher with an alpha, the `power_alpha` of its term.

    scores: one entry per teacher with score="log_probability" for the rows of the batch, or None if it has no alpha. A
    batch without samples is returned unchanged.
    """
    if batch.sampled is None:
        return batch
    prompts, entries = batch.sampled.prompts, zip(batch.teachers, scores, alphas, strict=True)
    return replace(batch, teachers=tuple(_with_rollout_weights(*entry, prompts) for entry in entries))


def _with_rollout_weights(
    teacher: TeacherRows, scores: SequenceScores | None, alpha: float | None, prompts: Tensor
) -> TeacherRows:
    if scores is None or alpha is None:
        return teacher
    logprob = mean_logprob(scores)
    # Keep NaN: the metrics then name the teacher, and the step is skipped (methods.md §12).
    weights = confidence_weights(logprob.nan_to_num(nan=-torch.inf, neginf=-torch.inf), prompts, alpha)
    return replace(teacher, rollout_weights=weights.masked_fill(logprob.isnan(), torch.nan).float())


_Scores = Sequence[SequenceScores]
"""Scores of the batch rows, one entry per teacher."""


def _unchanged(settings: AggregationBase, batch: Batch, scores: _Scores, priors: Sequence[float]) -> Batch:
    return batch


@dataclass(frozen=True, slots=True)
class Rule:
    """The functions of an aggregation; each takes the settings as its first argument."""

    factors: Callable[[Any, Sequence[float], Sequence[int]], list[float]] = lambda settings, weights, vocab_sizes: (
        [1.0] * len(weights)
    )
    """Function from the teachers' weights and vocabulary sizes to the factors of their losses."""
    apply_weights: Callable[[Any, Batch, _Scores, Sequence[float]], Batch] = _unchanged
    """Function from the global batch, the scores that the settings request and the teachers' configured weights to the
    batch with sequence weights, or with empty rows for teachers that were not selected.
    """
    counts_together: bool = False
    """Each text has one teacher, and units of all teachers count alike."""
    averages_logits: bool = False
    """All teachers' logits are averaged, so there is one loss."""


def _weighted_by_scores(settings: WeightedSum, batch: Batch, scores: _Scores, priors: Sequence[float]) -> Batch:
    if settings.score is None:
        return batch
    return weighted(batch, sequence_weights(scores, score=settings.score, alpha=settings.alpha, priors=priors))


def _selected(settings: SelectTeacher, batch: Batch, scores: _Scores, priors: Sequence[float]) -> Batch:
    """Keep only the selected teacher's row of each sequence.

    A NaN score cannot be compared: its teacher is selected with a weight of NaN, so that the metrics name it and the
    step is skipped (methods.md §12).
    """
    selected = mask_unrouted(batch, select_teacher(scores, per=settings.per))
    is_nan = bits_per_byte(scores).isnan()
    if not is_nan.any():
        return selected
    return weighted(selected, torch.ones(is_nan.shape).masked_fill(is_nan, torch.nan))


RULES: dict[type[AggregationBase], Rule] = {
    WeightedSum: Rule(factors=teacher_weights, apply_weights=_weighted_by_scores),
    AveragedLogits: Rule(averages_logits=True),
    SelectTeacher: Rule(apply_weights=_selected, counts_together=True),
    Routed: Rule(counts_together=True),
}
require_lines(choices(Aggregation), RULES, "RULES in nemo_opd/aggregation/rules.py")


def apply_teacher_weights(
    settings: AggregationBase, batch: Batch, scores: _Scores, *, priors: Sequence[float]
) -> Batch:
    """Apply the aggregation's teacher weights, or its selection of teachers, to the global batch.

    scores: one entry per teacher for the rows of the batch; unused by aggregations without a score. priors: the
    teachers' configured weights.
    """
    return RULES[type(settings)].apply_weights(settings, batch, scores, priors)
