"""Clipped policy gradient on sequence rewards, the baseline without a teacher (methods.md §10.6)."""

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.readings import Readings
from nemo_opd.logits.rows import LogitRows, trainable_rows
from nemo_opd.logits.term import Term, unit_cells
from nemo_opd.losses.arguments import check_positions, own_columns
from nemo_opd.losses.clipped_ratio import Clip, clip_metrics
from nemo_opd.losses.importance import NUM_READINGS, Importance
from nemo_opd.losses.reduction import label_rows, next_tokens
from nemo_opd.losses.surprise import LIVE_COPIES, surprise
from nemo_opd.types import Mean, Metric


@Loss
def grpo(
    student_logits: Tensor | LogitRows,
    *,
    ids: Tensor,
    mask: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    behaviour_logprobs: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
    importance_level: str = "token",
    importance_cap: float | None = None,
    importance_veto: float | None = None,
    normalizer: float | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> PlannedLoss:
    """Compute −Σ min(r A, clip(r, 1 − clip_low, 1 + clip_high) A) over scored tokens / normalizer (methods.md §10.6).

    r = p(token) / exp(logprobs), at temperature 1; A is the advantage of the token's sequence, see `group_advantages`.
    dual_clip: for tokens with a negative A the loss is at most −dual_clip · A, whatever their ratio.
    behaviour_logprobs, importance_*: as for `sampled_kl`, by default `logprobs`, no cap and no veto (methods.md §11).

    Unshifted logits [B, S, V]; ids, logprobs and mask [B, S]: token i is scored by the logits at i−1; advantages [B].
    normalizer: scored tokens of the global batch, by default of this call, so that tokens count the same whatever the
    length of their sequence. vocab_size: leading columns of the head that belong to the tokenizer, by default all.
    Metrics: `policy/loss` (mean per token), `policy/clip_fraction`, `policy/ratio` and those of `Importance.metrics`.
    Raises ConfigError for shapes, sizes, names or bounds that do not fit.
    """
    student, clip = trainable_rows(student_logits), Clip(clip_low, clip_high, dual_clip)
    importance = Importance(importance_level, importance_cap, importance_veto)
    behaviour = logprobs if behaviour_logprobs is None else behaviour_logprobs
    check_positions(student.shape, ids=ids, mask=mask, logprobs=logprobs, behaviour_logprobs=behaviour)
    if tuple(advantages.shape) != (len(ids),):
        raise ConfigError(
            f"advantages has shape {list(advantages.shape)} for {len(ids)} sequences; give one each: [{len(ids)}]"
        )
    size = own_columns("vocab_size", vocab_size, student.shape[-1], student.shape[-1])
    rows = label_rows(mask)
    targets = next_tokens(ids, rows).long()
    token_proximal, token_behaviour = next_tokens(logprobs, rows), next_tokens(behaviour, rows)
    units = rows // ids.shape[1]
    token_advantages = advantages.index_select(0, units)
    sequences = importance.of_sequences(student, ids=ids, mask=mask, behaviour=behaviour, vocab_size=size)
    readings = Readings.of(student, len(rows), 2 + NUM_READINGS)

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        s = -surprise(logits, targets[part])
        proximal, behaviour = token_proximal[part].to(s.dtype), token_behaviour[part].to(s.dtype)
        weights = importance.applied(s.detach(), proximal, behaviour, sequences, units[part])
        surrogate = clip(s - proximal, token_advantages[part].to(s.dtype))
        ratio_readings = torch.stack([surrogate.ratio, surrogate.is_clipped.to(s.dtype)], 1)
        readings.put(part, torch.cat([ratio_readings, weights.readings()], 1))
        return weights.factor * surrogate.loss

    def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
        ratio_readings, weight_readings = readings.found().tensor_split([2])
        loss: dict[str, Metric] = {"policy/loss": Mean(unweighted, len(rows))}
        return loss | clip_metrics(*ratio_readings) | importance.metrics(weight_readings, sequences)

    term = Term(rows, loss_of, unit_cells(len(rows), LIVE_COPIES * size), size, chunk_size=chunk_size)
    divisor = (len(rows) if normalizer is None else normalizer) or 1
    return PlannedLoss(student, [term], 1 / divisor, metrics_of)
