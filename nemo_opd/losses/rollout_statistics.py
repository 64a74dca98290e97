"""Statistics of sampled sequences: the student's entropy, and the mismatch between engine and trainer."""

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
"""Tensors of a chunk's size alive at its peak."""


def plan_rollout_statistics(
    student_logits: Tensor | LogitRows,
    tokens: TokenRows,
    sampled: SampledRows,
    *,
    vocab_size: int,
    chunk_size: int | None = None,
) -> PlannedLoss:
    """Plan means over the scored tokens that were sampled, to be computed together with losses; without a gradient.

    At temperature 1 and in nats: the student's `entropy`; with d = its log p(token) − the engine's, `mismatch` |d|,
    `mismatch_max` the largest of them, and `mismatch_k3` exp(d) − 1 − d, an estimate of KL(engine ‖ student) (d is cut
    at `LARGEST_LOG_RATIO`). `bits_per_byte` of those that carry text. Unshifted logits [B, S, V], of which the first
    `vocab_size` columns count. Raises ConfigError for shapes or sizes that do not fit.
    """
    student = trainable_rows(student_logits)
    check_positions(student.shape, ids=tokens.ids, loss_mask=tokens.loss_mask, logprobs=sampled.logprobs)
    size = own_columns("vocab_size", vocab_size, student.shape[-1], student.shape[-1])
    rows = label_rows(sampled_mask(tokens.loss_mask, sampled))
    targets = next_tokens(tokens.ids, rows).long()
    of_engine = next_tokens(sampled.logprobs, rows)
    num_bytes = next_tokens(tokens.num_bytes, rows)

    def read(logits: Tensor, part: slice) -> Tensor:
        log_p = logits.log_softmax(-1)
        own = log_p.gather(1, targets[part].unsqueeze(1)).squeeze(1)
        return torch.stack([torch.special.entr(log_p.exp()).sum(1), own], 1)

    def metrics_of(found: Tensor) -> dict[str, Metric]:
        entropy, own = found
        difference, count = own - of_engine, len(rows)
        k3 = torch.expm1(difference.clamp(max=LARGEST_LOG_RATIO)) - difference.clamp(max=LARGEST_LOG_RATIO)
        bits = -(own * (num_bytes > 0)).sum() / math.log(2)
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
