"""Next-token accuracy and calibration of the top token's probability."""

import torch
from torch import Tensor

from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.readings import plan_readings
from nemo_opd.logits.rows import LogitRows, trainable_rows
from nemo_opd.logits.term import unit_cells
from nemo_opd.losses.arguments import check_positions, own_columns
from nemo_opd.losses.reduction import label_rows, next_tokens
from nemo_opd.types import Last, Mean, Metric, Metrics, TokenRows

_LIVE_COPIES = 3
"""Tensors of a block's size alive at its memory peak: the logits, their fp32 copy and their exponentials."""
_CALIBRATION_GAP = "calibration_gap/"
"""Prefix of the metrics, one per confidence bin, that `calibration_error` sums up."""
_NUM_BINS = 15


def plan_accuracy(
    logits_BSV: Tensor | LogitRows, tokens: TokenRows, *, vocab_size: int, chunk_size: int | None = None
) -> PlannedLoss:
    """Plan the metric `accuracy` and the inputs of `calibration_error`, to be computed together with losses.

    `accuracy` is the share of scored tokens with the largest logit among the first `vocab_size` columns. Logits
    [B, S, V] are unshifted: token i is scored by the logits at i−1, so token 0 never counts. Among tied largest logits,
    the column that `max` returns counts. Raises ConfigError for shapes or sizes that do not fit.
    """
    student = trainable_rows(logits_BSV)
    check_positions(student.shape, ids=tokens.ids, loss_mask=tokens.loss_mask)
    size = own_columns("vocab_size", vocab_size, student.shape[-1], student.shape[-1])
    rows = label_rows(tokens.loss_mask)
    targets = next_tokens(tokens.ids, rows).long()

    def read(logits: Tensor, part: slice) -> Tensor:
        largest, likeliest = logits.max(-1)
        return torch.stack([(likeliest == targets[part]).to(logits.dtype), (largest - logits.logsumexp(-1)).exp()], 1)

    cells = unit_cells(len(rows), _LIVE_COPIES * size)
    return plan_readings(student, rows, read, _metrics, num_values=2, cells=cells, width=size, chunk_size=chunk_size)


def _metrics(readings: Tensor) -> dict[str, Metric]:
    """Compute the metrics from hits and confidences, float64 [2, U]."""
    hits, confidence = readings
    bins = (confidence * _NUM_BINS).ceil().long().clamp(1, _NUM_BINS) - 1
    gaps = torch.zeros(_NUM_BINS, dtype=readings.dtype, device=readings.device).index_add_(0, bins, confidence - hits)
    number = readings.shape[1]
    gap_metrics = {f"{_CALIBRATION_GAP}{i}": Mean(gap, number) for i, gap in enumerate(gaps)}
    return {"accuracy": Mean(hits.sum(), number), **gap_metrics}


def calibration_error(metrics: Metrics) -> float:
    """Return the expected calibration error: Σ over bins of confidence |Σ (confidence − hit)| / scored tokens.

    The confidence is the probability of the likeliest token; bins have equal width. metrics: merged metrics of
    `plan_accuracy` over all batches. Source: Guo et al. 2017, "On Calibration of Modern Neural Networks".
    """
    return sum(abs(metric.value()) for name, metric in metrics.items() if name.startswith(_CALIBRATION_GAP))


def with_calibration_error(metrics: Metrics) -> dict[str, Metric]:
    """Replace the metrics of confidence bins, if any, by `calibration_error`."""
    other_metrics = {name: metric for name, metric in metrics.items() if not name.startswith(_CALIBRATION_GAP)}
    if len(other_metrics) == len(metrics):
        return other_metrics
    return other_metrics | {"calibration_error": Last(calibration_error(metrics))}
