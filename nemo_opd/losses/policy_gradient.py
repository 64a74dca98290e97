"""The clipped policy gradient of rewarded sequences: the baseline without a teacher (methods.md §10.6)."""

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
    dual_clip: tokens of a negative A count dual_clip · A at most, whatever their ratio. behaviour_logprobs and the
    settings of importance: as of `sampled_kl`, by default `logprobs` and no cut (methods.md §11).

    Unshifted logits [B, S, V]; ids, logprobs and mask [B, S]: token i is scored, by the logits at i−1; advantages [B].
    normalizer: scored tokens of the global batch, by default of this call, so that every token counts the same whatever
    the length of its sequence. vocab_size: columns of the head that belong to the tokenizer, by default all. Metrics:
    the loss as a mean (`policy/loss`), `policy/clip_fraction`, `policy/ratio` and those of `Importance.metrics`. Raises
    ConfigError for shapes, sizes, names or bounds that do not fit.
    """
    student, clip = trainable_rows(student_logits), Clip(clip_low, clip_high, dual_clip)
    importance = Importance(importance_level, importance_cap, importance_veto)
    sampled_by = logprobs if behaviour_logprobs is None else behaviour_logprobs
    check_positions(student.shape, ids=ids, mask=mask, logprobs=logprobs, behaviour_logprobs=sampled_by)
    if tuple(advantages.shape) != (len(ids),):
        raise ConfigError(
            f"advantages has shape {list(advantages.shape)} for {len(ids)} sequences; give one each: [{len(ids)}]"
        )
    size = own_columns("vocab_size", vocab_size, student.shape[-1], student.shape[-1])
    rows = label_rows(mask)
    targets = next_tokens(ids, rows).long()
    proximal, behaviour = next_tokens(logprobs, rows), next_tokens(sampled_by, rows)
    units = rows // ids.shape[1]
    of_tokens = advantages.index_select(0, units)
    sequences = importance.of_sequences(student, ids=ids, mask=mask, behaviour=sampled_by, vocab_size=size)
    readings = Readings.of(student, len(rows), 2 + NUM_READINGS)

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        s = -surprise(logits, targets[part])
        own = (s.detach(), proximal[part].to(s.dtype), behaviour[part].to(s.dtype))
        weighted = importance.applied(*own, sequences, units[part])
        found = clip(s - own[1], of_tokens[part].to(s.dtype))
        of_ratio = torch.stack([found.ratio, found.is_clipped.to(s.dtype)], 1)
        readings.put(part, torch.cat([of_ratio, weighted.readings()], 1))
        return weighted.factor * found.loss

    def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
        of_ratio, of_weights = readings.found().tensor_split([2])
        loss: dict[str, Metric] = {"policy/loss": Mean(unweighted, len(rows))}
        return loss | clip_metrics(*of_ratio) | importance.metrics(of_weights, sequences)

    term = Term(rows, loss_of, unit_cells(len(rows), LIVE_COPIES * size), size, chunk_size=chunk_size)
    divisor = (len(rows) if normalizer is None else normalizer) or 1
    return PlannedLoss(student, [term], 1 / divisor, metrics_of)
