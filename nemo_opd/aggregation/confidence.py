"""Rollout weights by teacher confidence: within a prompt, likelier rollouts weigh more (methods.md §10.3)."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nemo_opd.aggregation.scores import mean_logprob
from nemo_opd.losses.rollout_weights import confidence_weights
from nemo_opd.types import Batch, SequenceScores, TeacherRows


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
    return replace(batch, teachers=tuple(_weighted(*entry, prompts) for entry in entries))


def _weighted(teacher: TeacherRows, scores: SequenceScores | None, alpha: float | None, prompts: Tensor) -> TeacherRows:
    if scores is None or alpha is None:
        return teacher
    logprob = mean_logprob(scores)
    # Keep NaN: the metrics then name the teacher, and the step is skipped (methods.md §12).
    weights = confidence_weights(logprob.nan_to_num(nan=-torch.inf, neginf=-torch.inf), prompts, alpha)
    return replace(teacher, rollout_weights=weights.masked_fill(logprob.isnan(), torch.nan).float())
