"""Metrics of a batch that need no model: coverage of the losses, weights of teachers, and leakage of contexts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nemo_opd.aggregation.objective import TrainingObjective
from nemo_opd.losses.position_targets import POSITION_KINDS, position_kinds
from nemo_opd.types import Batch, Mean, Metric


def coverage_metrics(objective: TrainingObjective, batch: Batch, names: Sequence[str]) -> dict[str, Metric]:
    """Return `kd_coverage/<teacher>`, the share of the student's scored tokens that are in a unit of its KD, and with
    another tokenizer `kd_positions/<teacher>`, the compared positions over the scored tokens, and the same for each
    kind of position that occurs, `kd_positions/<teacher>/<kind>`.

    names: the names of all teachers. With `select_teacher` and `routed` only a teacher's own texts count, and a teacher
    without texts has no metric.
    """
    metrics: dict[str, Metric] = {}
    for part in objective.parts:
        rows, is_scored = batch.teachers[part.teacher], batch.student.loss_mask
        covered = part.loss.num_covered(*part.rows(batch))
        if objective.count_together:
            is_scored = is_scored & (rows.tokens.lengths > 0).unsqueeze(1)
        if total := int(is_scored.sum()):
            part_names = names if part.name is None else [part.name]
            metrics |= {f"kd_coverage/{name}": Mean(int(covered.sum()), total) for name in part_names}
            if rows.chunks is not None:
                is_compared = part.loss.positions(*part.rows(batch))
                kinds = position_kinds(rows.chunks, batch.student, rows.tokens)
                metrics[f"kd_positions/{part.name}"] = Mean(int(is_compared.sum()), total)
                metrics |= _by_kind(f"kd_positions/{part.name}", kinds, is_compared, is_scored)
    return metrics


def _by_kind(name: str, kinds: Tensor, is_compared: Tensor, is_scored: Tensor) -> dict[str, Metric]:
    """Return the share of the scored tokens that are compared for each kind of position: masks and kinds [B, S]."""
    masks = (mask & (kinds >= 0) for mask in (is_compared, is_scored))
    compared, scored = (kinds[mask].bincount(minlength=len(POSITION_KINDS)) for mask in masks)
    counts = zip(POSITION_KINDS, compared.tolist(), scored.tolist(), strict=True)
    return {f"{name}/{kind}": Mean(number, of) for kind, number, of in counts if of}


def share_metrics(objective: TrainingObjective, batch: Batch) -> dict[str, Metric]:
    """Return per teacher the mean sequence weight (`weight/`) or the share of sequences (`share/`), if it varies by
    batch; with another tokenizer also `changed_history/`, the share of aligned chunks after contents that the student
    reads differently.
    """
    metrics: dict[str, Metric] = {}
    for part in objective.parts:
        rows = batch.teachers[part.teacher]
        if objective.count_together:
            metrics[f"share/{part.name}"] = Mean(int((rows.tokens.lengths > 0).sum()), len(batch))
        elif rows.weights is not None:
            metrics[f"weight/{part.name}"] = Mean(part.weight * float(rows.weights.sum()), len(batch))
        if rows.chunks is not None and rows.chunks.histories is not None:
            usable, changed = rows.chunks.histories.sum(0).tolist()
            metrics[f"changed_history/{part.name}"] = Mean(changed, usable)
    return metrics


def leakage_metrics(batch: Batch, names: Sequence[str]) -> dict[str, Metric]:
    """Return `leakage/<teacher>` of teachers with a context: the share of response bytes that also occur in it.

    names: the names of all teachers (methods.md §13).
    """
    metrics: dict[str, Metric] = {}
    for name, rows in zip(names, batch.teachers, strict=True):
        if rows.leakage is not None:
            leaked, num_bytes = rows.leakage.sum(0).tolist()
            if num_bytes:
                metrics[f"leakage/{name}"] = Mean(leaked, num_bytes)
    return metrics
