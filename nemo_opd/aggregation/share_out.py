"""Which teacher has how much of a say in which sequence, settled once for a global batch."""

from collections.abc import Sequence
from typing import Literal

import torch

from nemo_opd.aggregation.parts import Parts
from nemo_opd.aggregation.scores import bits_per_byte
from nemo_opd.aggregation.select_teacher import select_teacher
from nemo_opd.aggregation.weighted_sum import weighted
from nemo_opd.aggregation.weights import sequence_weights
from nemo_opd.config.aggregation import Aggregation
from nemo_opd.data.collate import only_chosen
from nemo_opd.losses.reduction import count_label_tokens
from nemo_opd.types import Batch, Mean, Metric, SequenceScores


def share_out(
    aggregation: Aggregation, batch: Batch, scores: Sequence[SequenceScores], *, priors: Sequence[float]
) -> Batch:
    """The batch with the weights of its sequences, or with empty rows for teachers that were not selected.

    scores: by teacher, of the rows of the batch; unused by aggregations that ask for none. priors: the teachers' own
    weights.
    """
    if aggregation.type == "select_teacher":
        return chosen(batch, scores, aggregation.per)
    if aggregation.type == "weighted_sum" and aggregation.score is not None:
        weights = sequence_weights(scores, score=aggregation.score, alpha=aggregation.alpha, priors=priors)
        return weighted(batch, weights)
    return batch


def coverage_metrics(parts: Parts, batch: Batch, names: Sequence[str]) -> dict[str, Metric]:
    """By teacher: `kd_coverage/`, the share of the student's scored tokens that its KD says something about.

    names: of all teachers. With `select_teacher` and `routed` a teacher is measured on its own texts, and
    left out if it has none.
    """
    metrics: dict[str, Metric] = {}
    for part in parts.parts:
        rows = batch.teachers[part.teacher]
        scored = count_label_tokens(batch.student.loss_mask)
        covered = part.term.num_covered(rows.student_side(batch.student), rows, batch.sampled)
        if parts.count_together:
            scored = scored * (rows.tokens.lengths > 0)
        if total := int(scored.sum()):
            named = names if part.name is None else [part.name]
            metrics |= {f"kd_coverage/{name}": Mean(int(covered.sum()), total) for name in named}
    return metrics


def chosen(batch: Batch, scores: Sequence[SequenceScores], per: Literal["sequence", "batch"]) -> Batch:
    """The batch of which each sequence is taught by one teacher.

    A teacher whose score is NaN cannot be compared: it is given the sequence with a weight of NaN, so that the loss
    says who it was, and the step is not taken (METHODS §16).
    """
    choice = select_teacher(scores, per=per)
    taught = only_chosen(batch, choice)
    is_nan = bits_per_byte(scores).isnan()
    if not is_nan.any():
        return taught
    return weighted(taught, torch.ones(is_nan.shape).masked_fill(is_nan, torch.nan))


def share_metrics(parts: Parts, batch: Batch) -> dict[str, Metric]:
    """By teacher: the mean weight of a sequence (`weight/`), or the share of sequences that it teaches (`share/`), if
    that differs from batch to batch; with another tokenizer, the share of aligned chunks behind contents that the
    student reads differently (`changed_history/`).
    """
    metrics: dict[str, Metric] = {}
    for part in parts.parts:
        rows = batch.teachers[part.teacher]
        if parts.count_together:
            metrics[f"share/{part.name}"] = Mean(int((rows.tokens.lengths > 0).sum()), len(batch))
        elif rows.weights is not None:
            metrics[f"weight/{part.name}"] = Mean(part.weight * float(rows.weights.sum()), len(batch))
        if rows.chunks is not None and rows.chunks.histories is not None:
            usable, changed = rows.chunks.histories.sum(0).tolist()
            metrics[f"changed_history/{part.name}"] = Mean(changed, usable)
    return metrics
