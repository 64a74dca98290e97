"""The clipped policy gradient of rewarded sequences: the baseline without a teacher (METHODS §10)."""

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.losses.arguments import check_positions, own_columns
from nemo_opd.losses.clipped_ratio import Clip, clip_metrics
from nemo_opd.losses.logit_rows import LogitRows, trainable_rows
from nemo_opd.losses.planned import Loss, PlannedLoss
from nemo_opd.losses.readings import Readings
from nemo_opd.losses.reduction import label_rows
from nemo_opd.losses.surprise import LIVE_COPIES, surprise
from nemo_opd.losses.term import Term, unit_cells
from nemo_opd.types import Mean, Metric


@Loss
def grpo(
    student_logits: Tensor | LogitRows,
    *,
    ids: Tensor,
    mask: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
    normalizer: float | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> PlannedLoss:
    """−Σ min(r A, clip(r, 1 − clip_low, 1 + clip_high) A) over scored tokens / normalizer (METHODS §10).

    r = p(token) / exp(logprobs), at temperature 1; A is the advantage of the token's sequence, see `group_advantages`.
    dual_clip: tokens of a negative A count dual_clip · A at most, whatever their ratio. Unshifted logits [B, S, V];
    ids, logprobs and mask [B, S]: token i is scored, by the logits at i−1; advantages [B]. normalizer: scored tokens of
    the global batch, by default of this call, so that every token counts the same whatever the length of its sequence.
    vocab_size: columns of the head that belong to the tokenizer, by default all. Metrics: the loss as a mean
    (`policy/loss`), `policy/clip_fraction` and `policy/ratio`. Raises ConfigError for shapes, sizes or bounds that do
    not fit.
    """
    student, clip = trainable_rows(student_logits), Clip(clip_low, clip_high, dual_clip)
    check_positions(student.shape, ids=ids, mask=mask, logprobs=logprobs)
    if tuple(advantages.shape) != (len(ids),):
        raise ConfigError(
            f"advantages has shape {list(advantages.shape)} for {len(ids)} sequences; give one each: [{len(ids)}]"
        )
    size = own_columns("vocab_size", vocab_size, student.shape[-1], student.shape[-1])
    rows = label_rows(mask)
    targets = ids.flatten().index_select(0, rows + 1).long()
    behaviour = logprobs.flatten().index_select(0, rows + 1)
    of_tokens = advantages.index_select(0, rows // ids.shape[1])
    readings = Readings.of(student, len(rows), 2)

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        log_ratio = -surprise(logits, targets[part]) - behaviour[part].to(logits.dtype)
        found = clip(log_ratio, of_tokens[part].to(logits.dtype))
        readings.put(part, torch.stack([found.ratio, found.is_clipped.to(logits.dtype)], 1))
        return found.loss

    def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
        return {"policy/loss": Mean(unweighted, len(rows))} | clip_metrics(*readings.found())

    term = Term(rows, loss_of, unit_cells(len(rows), LIVE_COPIES * size), size, chunk_size=chunk_size)
    divisor = (len(rows) if normalizer is None else normalizer) or 1
    return PlannedLoss(student, [term], 1 / divisor, metrics_of)
