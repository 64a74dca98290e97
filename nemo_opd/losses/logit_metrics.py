"""Metrics of logits: accuracy, calibration, bits per byte, rollout statistics, overlap, and the mass of images."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host, to_list
from nemo_opd.logits.blockwise import compute_dtype
from nemo_opd.logits.planned import PlannedLoss, Readings, plan_readings
from nemo_opd.logits.rows import LogitRows, trainable_rows
from nemo_opd.logits.term import ReadAhead, unit_cells
from nemo_opd.losses.arguments import (
    LabelPositions,
    TokenArguments,
    check_positions,
    label_rows,
    next_tokens,
    own_columns,
    sampled_mask,
)
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs
from nemo_opd.losses.cross_entropy import cross_entropy
from nemo_opd.losses.importance import LARGEST_LOG_RATIO
from nemo_opd.losses.piece_tree import first_pieces
from nemo_opd.losses.sparse_projection import TokenPairs, cached_while_alive
from nemo_opd.losses.support import largest, require_whole
from nemo_opd.types import Last, Max, Mean, Metric, Metrics, SampledRows, TokenRows

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_COPIES_FOR_ACCURACY, _COPIES_FOR_STATISTICS, _COPIES_FOR_OVERLAP = 3, 4, 3
"""Tensors of the size of a block's rows, or for overlap of each side's, that are alive at its memory peak."""
_CALIBRATION_GAP = "calibration_gap/"
"""Prefix of the metrics, one per confidence bin, that `calibration_error` sums up."""
_NUM_BINS = 15
_TOP_K = 16
"""Compared tokens per side."""
STRIDE = 16
"""Metrics of the teacher's distribution measure only tokens, or aligned chunks, 1, 17, 33, …."""


@dataclass(frozen=True, slots=True)
class AccuracyRecorder:
    """The metric `accuracy` and the inputs of `calibration_error`, and which tokens were hit."""

    plan: PlannedLoss
    """The plan to compute together with losses; it records the hits."""
    readings: Readings
    """Hits and confidences."""
    rows: Tensor
    """int64 [U]: indices into [B·S] of the logits that predict the scored tokens."""

    @staticmethod
    def of(
        logits_BSV: Tensor | LogitRows, tokens: TokenRows, *, vocab_size: int, chunk_size: int | None = None
    ) -> AccuracyRecorder:
        """Plan the metrics.

        `accuracy` is the share of scored tokens with the largest logit among the first `vocab_size` columns. Logits
        [B, S, V] are unshifted: token i is scored by the logits at i−1, so token 0 never counts. Among tied largest
        logits, the column that `max` returns counts. Raises ConfigError for shapes or sizes that do not fit.
        """
        student = trainable_rows(logits_BSV)
        check_positions(student.shape, ids=tokens.ids, loss_mask=tokens.loss_mask)
        size = own_columns("vocab_size", vocab_size, student.shape[-1], student.shape[-1])
        rows = label_rows(tokens.loss_mask)
        targets = next_tokens(tokens.ids, rows).long()

        def read(logits: Tensor, part: slice) -> Tensor:
            highest, likeliest = logits.max(-1)
            is_hit = (likeliest == targets[part]).to(logits.dtype)
            return torch.stack([is_hit, (highest - logits.logsumexp(-1)).exp()], 1)

        cells = unit_cells(len(rows), _COPIES_FOR_ACCURACY * size)
        readings = Readings.of(student, len(rows), 2)
        plan = plan_readings(
            student, rows, read, _accuracy_metrics, readings=readings, cells=cells, width=size, chunk_size=chunk_size
        )
        return AccuracyRecorder(plan, readings, rows)

    def hits(self) -> Tensor:
        """Return which scored tokens had the largest logit, bool [B, S]. Collective, like `Readings.gather`."""
        batch, width, _ = self.plan.source.shape
        is_hit = torch.zeros(batch * width, dtype=torch.bool, device=self.plan.source.device)
        return is_hit.index_copy_(0, self.rows + 1, self.readings.gather()[0] > 0).view(batch, width)


def _accuracy_metrics(readings: Tensor) -> dict[str, Metric]:
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
    `AccuracyRecorder` over all batches. Source: Guo et al. 2017, "On Calibration of Modern Neural Networks".
    """
    return sum(abs(metric.value()) for name, metric in metrics.items() if name.startswith(_CALIBRATION_GAP))


def with_calibration_error(metrics: Metrics) -> dict[str, Metric]:
    """Replace the metrics of confidence bins, if any, by `calibration_error`."""
    other_metrics = {name: metric for name, metric in metrics.items() if not name.startswith(_CALIBRATION_GAP)}
    if len(other_metrics) == len(metrics):
        return other_metrics
    return other_metrics | {"calibration_error": Last(calibration_error(metrics))}


def bits_per_byte(logits_BSV: Tensor | LogitRows, tokens: TokenRows, *, vocab_size: int) -> Mean:
    """Compute Σ −log₂ p of the scored tokens with bytes, divided by their number of bytes; no gradient.

    Logits [B, S, V] are unshifted. Tokens without bytes (special tokens) are left out, so that tokenizers with
    different special tokens are comparable.
    """
    with torch.no_grad():
        metric = plan_bits_per_byte(logits_BSV, tokens, vocab_size=vocab_size).compute().metrics["bits_per_byte"]
    assert isinstance(metric, Mean)
    return metric


def plan_bits_per_byte(logits_BSV: Tensor | LogitRows, tokens: TokenRows, *, vocab_size: int) -> PlannedLoss:
    """Plan the metric `bits_per_byte`, to be computed together with losses."""
    counted = tokens.loss_mask & (tokens.num_bytes > 0)
    num_bytes = (tokens.num_bytes * counted)[:, 1:].sum()

    def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
        return {"bits_per_byte": Mean(unweighted / math.log(2), num_bytes)}

    plan = cross_entropy.plan(logits_BSV, tokens.ids, mask=counted, vocab_size=vocab_size)
    return replace(plan, metrics_of=metrics_of)


def plan_rollout_statistics(
    student_logits: Tensor | LogitRows,
    tokens: TokenRows,
    sampled: SampledRows,
    *,
    vocab_size: int,
    chunk_size: int | None = None,
) -> PlannedLoss:
    """Plan means over sampled scored tokens, to be computed together with losses; no gradient.

    At temperature 1 and in nats: the student's `entropy`; with d = log p(token) of the student − of the engine,
    `mismatch` is the mean |d|, `mismatch_max` the largest |d|, and `mismatch_k3` the mean exp(d) − 1 − d, an estimate
    of KL(engine ‖ student) with d clamped at `LARGEST_LOG_RATIO`. `bits_per_byte` covers tokens with bytes. Unshifted
    logits [B, S, V]; only the first `vocab_size` columns count. Raises ConfigError for shapes or sizes that do not fit.
    """
    student = trainable_rows(student_logits)
    check_positions(student.shape, ids=tokens.ids, loss_mask=tokens.loss_mask, logprobs=sampled.logprobs)
    size = own_columns("vocab_size", vocab_size, student.shape[-1], student.shape[-1])
    rows = label_rows(sampled_mask(tokens.loss_mask, sampled))
    targets = next_tokens(tokens.ids, rows).long()
    engine_log_p = next_tokens(sampled.logprobs, rows)
    num_bytes = next_tokens(tokens.num_bytes, rows)

    def read(logits: Tensor, part: slice) -> Tensor:
        log_p = logits.log_softmax(-1)
        token_log_p = log_p.gather(1, targets[part].unsqueeze(1)).squeeze(1)
        return torch.stack([torch.special.entr(log_p.exp()).sum(1), token_log_p], 1)

    def metrics_of(readings: Tensor) -> dict[str, Metric]:
        entropy, token_log_p = readings
        difference, count = token_log_p - engine_log_p, len(rows)
        k3 = torch.expm1(difference.clamp(max=LARGEST_LOG_RATIO)) - difference.clamp(max=LARGEST_LOG_RATIO)
        bits = -(token_log_p * (num_bytes > 0)).sum() / math.log(2)
        return {
            "entropy": Mean(entropy.sum(), count),
            "mismatch": Mean(difference.abs().sum(), count),
            "mismatch_max": Max(difference.abs().max() if count else 0.0),
            "mismatch_k3": Mean(k3.sum(), count),
            "bits_per_byte": Mean(bits, num_bytes.sum()),
        }

    return plan_readings(
        student,
        rows,
        read,
        metrics_of,
        readings=Readings.of(student, len(rows), 2),
        cells=unit_cells(len(rows), _COPIES_FOR_STATISTICS * size),
        width=size,
        chunk_size=chunk_size,
    )


def plan_overlap(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    top_k: int = _TOP_K,
    **shared: Unpack[TokenArguments],
) -> PlannedLoss:
    """Plan the metric `overlap`: the mean of |student's top_k ∩ teacher's top_k| / top_k over scored tokens.

    Unshifted logits [B, S, V] and [B, S, W] of one vocabulary and mask [B, S], as in `same_vocab`. Raises ConfigError
    for shapes or sizes that do not fit.
    """
    places = LabelPositions.of(student_logits, teacher_logits, **shared)
    sizes = places.size, places.size
    return _plan_overlap(places, places.student_rows, places.teacher_ahead(), sizes, min(top_k, places.size), None)


def plan_chunk_overlap(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix,
    top_k: int = _TOP_K,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Plan `overlap` at the first positions of aligned chunks, replacing student tokens by their exact partners.

    Tokens without a partner never match, so 1 may be out of reach. Arguments as for `p_kl`, with a whole teacher.
    Raises ConfigError for shapes or sizes that do not fit, ProjectionError for a projection without exact pairs.
    """
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=1.0, projection=projection, **shared)
    require_whole(inputs.teacher, "overlap", "it needs all of the teacher's tokens")
    sizes, rows = (inputs.student_size, inputs.teacher_size), inputs.units.student_rows
    partner = TokenPairs.exact(projection, *sizes, inputs.device).partner
    ahead = inputs.teacher_ahead(inputs.units.teacher_rows)
    return _plan_overlap(inputs, rows, ahead, sizes, min(top_k, *sizes), partner)


def _plan_overlap(
    inputs: LabelPositions | ChunkInputs,
    rows: Tensor,
    ahead: ReadAhead,
    sizes: tuple[int, int],
    top_k: int,
    partner: Tensor | None,
) -> PlannedLoss:
    """Plan the metric at the student's rows [U]. partner: int64 [V], teacher tokens to replace student tokens by."""

    def read(logits: Tensor, part: slice) -> Tensor:
        student, teacher = largest(logits, top_k), largest(ahead.of(part), top_k)
        student = student if partner is None else partner[student]
        return (student.unsqueeze(2) == teacher.unsqueeze(1)).any(2).double().mean(1, keepdim=True)

    return plan_readings(
        inputs.student,
        rows,
        read,
        lambda readings: {"overlap": Mean(readings.sum(), readings.shape[1])},
        readings=Readings.of(inputs.student, len(rows), 1),
        cells=unit_cells(len(rows), _COPIES_FOR_OVERLAP * sum(sizes)),
        width=sizes[0],
        chunk_size=inputs.chunk_size,
        ahead=ahead,
    )


def teacher_images(loss: str, projection: ProjectionMatrix, pieces: str = "spelling") -> NDArray[np.bool_] | None:
    """Return which teacher tokens a loss type maps: bool [W], or None if it uses no map or the projection lacks it.

    The probability of other tokens goes into a rest cell or is left out (methods.md §5.14). pieces: `byte_prefix`'s.
    """
    tokens = np.arange(projection.teacher_vocab_size)
    if loss == "p_kl":
        return np.isin(tokens, projection.indices)
    if loss in ("gold", "strict"):
        return np.isin(tokens, projection.shared_pairs[:, 1])
    if loss == "byte_prefix" and pieces == "spelling":
        return None if projection.teacher_spellings is None else first_pieces(projection, pieces) >= 0
    if loss in ("byte_prefix", "escd") and projection.byte_prefix is not None:
        return projection.byte_prefix >= 0
    if loss == "shared_prefix" and projection.teacher_shared_prefix is not None:
        return projection.teacher_shared_prefix >= 0
    return None


def with_image_mass(plan: PlannedLoss, images: NDArray[np.bool_], student_chunk_id: Tensor) -> PlannedLoss:
    """Add the metric `kd_mass` to a chunk loss: the mean of the teacher's mass on tokens with an image.

    images: bool [W]. Measured at the first positions of every 16th chunk, numbered by `student_chunk_id` [B, S], in the
    rows that the loss reads: without another product with the teacher's head.
    """
    term = plan.terms[0]
    assert term.ahead is not None
    ahead = term.ahead

    def measured(rows: Tensor, chunk_id: Tensor) -> list[Tensor]:
        units = (next_tokens(chunk_id, term.first_of_units(rows)) % STRIDE == 1).nonzero().squeeze(1)
        return [units, ahead.first_rows(units)]

    units, teacher_rows = compute_on_host(measured, term.rows, student_chunk_id)
    unit_list = to_list(units)
    readings = Readings.of(plan.source, len(unit_list), 1)

    def watch(part: slice, rows: Tensor) -> None:
        measured = slice(bisect_left(unit_list, part.start), bisect_left(unit_list, part.stop))
        if measured.start < measured.stop:
            places = teacher_rows[measured] - ahead.span(part).start
            logits = rows.index_select(0, places).to(compute_dtype(plan.source))
            has_image = _on_device(images, logits.shape[1], logits.dtype, logits.device)
            readings.put(measured, logits.softmax(1) @ has_image)

    ahead.watch = watch

    def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
        masses = readings.gather()
        return plan.metrics_of(weighted, unweighted) | {"kd_mass": Mean(masses.sum(), masses.shape[1])}

    return replace(plan, metrics_of=metrics_of)


@cached_while_alive
def _on_device(images: NDArray[np.bool_], size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return 1 for teacher tokens with an image and 0 for tokens without: [size, 1]."""
    return torch.from_numpy(images[:size]).to(device, dtype).unsqueeze(1)
