"""Rollouts that a teacher finds likelier count for more, among those of a prompt (methods.md §10.3)."""

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
    """Add rollout weights to the batch for the teachers that have an alpha: `power_alpha` of their term.

    scores: by teacher, with score="log_probability", of the rows of the batch; None where it has no alpha. A batch
    without samples stays as it is.
    """
    if batch.sampled is None:
        return batch
    entries = zip(batch.teachers, scores, alphas, strict=True)
    return replace(batch, teachers=tuple(_weighted(*entry, batch.sampled.prompts) for entry in entries))


def _weighted(teacher: TeacherRows, scores: SequenceScores | None, alpha: float | None, prompts: Tensor) -> TeacherRows:
    if scores is None or alpha is None:
        return teacher
    logprob = mean_logprob(scores)
    # NaN stays where it is, so that the metrics name the teacher, and the step is not taken (methods.md §12).
    weights = confidence_weights(logprob.nan_to_num(nan=-torch.inf, neginf=-torch.inf), prompts, alpha)
    return replace(teacher, rollout_weights=weights.masked_fill(logprob.isnan(), torch.nan).float())
