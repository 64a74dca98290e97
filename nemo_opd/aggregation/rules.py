"""The rule of each aggregation type (methods.md §6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_opd.aggregation.scores import bits_per_byte
from nemo_opd.aggregation.select_teacher import select_teacher
from nemo_opd.aggregation.weighted_sum import teacher_weights, weighted
from nemo_opd.aggregation.weights import sequence_weights
from nemo_opd.config.aggregation import (
    Aggregation,
    AggregationBase,
    AveragedLogits,
    Routed,
    SelectTeacher,
    WeightedSum,
)
from nemo_opd.config.choices import choices, require_lines
from nemo_opd.data.collate import mask_unrouted
from nemo_opd.types import Batch, SequenceScores

_Scores = Sequence[SequenceScores]
"""Scores of the batch rows, one entry per teacher."""


def _equal_factors(settings: AggregationBase, weights: Sequence[float], vocab_sizes: Sequence[int]) -> list[float]:
    return [1.0] * len(weights)


def _unchanged(settings: AggregationBase, batch: Batch, scores: _Scores, priors: Sequence[float]) -> Batch:
    return batch


@dataclass(frozen=True, slots=True)
class Rule:
    """The functions of an aggregation; each takes the settings as its first argument."""

    factors: Callable[[Any, Sequence[float], Sequence[int]], list[float]] = _equal_factors
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
