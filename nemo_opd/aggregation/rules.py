"""Rules of the aggregations, one line a type (methods.md §6)."""

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
from nemo_opd.data.collate import only_chosen
from nemo_opd.types import Batch, SequenceScores

_Scores = Sequence[SequenceScores]
"""Scores of the rows of a batch, by teacher."""


def _equal_factors(settings: AggregationBase, weights: Sequence[float], vocab_sizes: Sequence[int]) -> list[float]:
    return [1.0] * len(weights)


def _unchanged(settings: AggregationBase, batch: Batch, scores: _Scores, priors: Sequence[float]) -> Batch:
    return batch


@dataclass(frozen=True, slots=True)
class Rule:
    """The functions of an aggregation, each with its settings as the first argument."""

    factors: Callable[[Any, Sequence[float], Sequence[int]], list[float]] = _equal_factors
    """Function from the teachers' weights and vocabulary sizes to the factor of each teacher's loss."""
    share_out: Callable[[Any, Batch, _Scores, Sequence[float]], Batch] = _unchanged
    """The global batch with the weights of its sequences, or with empty rows for teachers that were not selected, from
    the scores that the settings ask for and the teachers' own weights.
    """
    counts_together: bool = False
    """Each text is of one teacher, and units count the same, whichever teacher they are of."""
    averages_logits: bool = False
    """All teachers' logits are averaged, so there is one loss."""


def _weighted_by_scores(settings: WeightedSum, batch: Batch, scores: _Scores, priors: Sequence[float]) -> Batch:
    if settings.score is None:
        return batch
    return weighted(batch, sequence_weights(scores, score=settings.score, alpha=settings.alpha, priors=priors))


def _chosen(settings: SelectTeacher, batch: Batch, scores: _Scores, priors: Sequence[float]) -> Batch:
    """Return the batch of which each sequence is taught by one teacher.

    A teacher whose score is NaN cannot be compared: it is given the sequence with a weight of NaN, so that the
    metrics name it, and the step is not taken (methods.md §12).
    """
    taught = only_chosen(batch, select_teacher(scores, per=settings.per))
    is_nan = bits_per_byte(scores).isnan()
    if not is_nan.any():
        return taught
    return weighted(taught, torch.ones(is_nan.shape).masked_fill(is_nan, torch.nan))


RULES: dict[type[AggregationBase], Rule] = {
    WeightedSum: Rule(factors=teacher_weights, share_out=_weighted_by_scores),
    AveragedLogits: Rule(averages_logits=True),
    SelectTeacher: Rule(share_out=_chosen, counts_together=True),
    Routed: Rule(counts_together=True),
}
require_lines(choices(Aggregation), RULES, "RULES in nemo_opd/aggregation/rules.py")


def share_out(settings: AggregationBase, batch: Batch, scores: _Scores, *, priors: Sequence[float]) -> Batch:
    """Return the global batch with what each teacher counts for in each sequence.

    scores: by teacher, of the rows of the batch; unused by aggregations that ask for none. priors: the teachers' own
    weights.
    """
    return RULES[type(settings)].share_out(settings, batch, scores, priors)
