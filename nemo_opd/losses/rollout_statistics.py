"""Statistics of sampled sequences: student entropy and mismatch between engine and trainer."""

import math

import torch
from torch import Tensor

from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.readings import plan_readings
from nemo_opd.logits.rows import LogitRows, trainable_rows
from nemo_opd.logits.term import unit_cells
from nemo_opd.losses.arguments import check_positions, own_columns
from nemo_opd.losses.clipped_ratio import LARGEST_LOG_RATIO
from nemo_opd.losses.reduction import label_rows, next_tokens, sampled_mask
from nemo_opd.types import Max, Mean, Metric, SampledRows, TokenRows

_LIVE_COPIES = 4
"""Tensors of a block's size that are alive at its memory peak."""


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
        num_values=2,
        cells=unit_cells(len(rows), _LIVE_COPIES * size),
        width=size,
        chunk_size=chunk_size,
    )
