"""Metrics of each teacher's share in the KD."""

from collections.abc import Sequence

from nemo_opd.aggregation.parts import TeacherLosses
from nemo_opd.losses.reduction import count_label_tokens
from nemo_opd.types import Batch, Mean, Metric


def coverage_metrics(parts: TeacherLosses, batch: Batch, names: Sequence[str]) -> dict[str, Metric]:
    """Return `kd_coverage/<teacher>`, the share of the student's scored tokens that are in a unit of its KD, and with
    another tokenizer `kd_positions/<teacher>`, the units over the scored tokens.

    names: the names of all teachers. With `select_teacher` and `routed` only a teacher's own texts count, and a teacher
    without texts has no metric.
    """
    metrics: dict[str, Metric] = {}
    for part in parts.parts:
        rows = batch.teachers[part.teacher]
        scored = count_label_tokens(batch.student.loss_mask)
        covered = part.num_covered(batch)
        if parts.count_together:
            scored = scored * (rows.tokens.lengths > 0)
        if total := int(scored.sum()):
            part_names = names if part.name is None else [part.name]
            metrics |= {f"kd_coverage/{name}": Mean(int(covered.sum()), total) for name in part_names}
            if rows.chunks is not None:
                metrics[f"kd_positions/{part.name}"] = Mean(part.num_positions(batch), total)
    return metrics


def share_metrics(parts: TeacherLosses, batch: Batch) -> dict[str, Metric]:
    """Return per teacher the mean sequence weight (`weight/`) or the share of sequences (`share/`), if it varies by
    batch; with another tokenizer also `changed_history/`, the share of aligned chunks after contents that the student
    reads differently.
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
