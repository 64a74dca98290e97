"""The KL between student and teacher, estimated on the tokens that were sampled (METHODS §10)."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.losses.arguments import check_positions
from nemo_opd.losses.clipped_ratio import LARGEST_LOG_RATIO, Clip, clip_metrics
from nemo_opd.losses.label_positions import LabelPositions
from nemo_opd.losses.logit_rows import LogitRows
from nemo_opd.losses.planned import Loss, PlannedLoss
from nemo_opd.losses.readings import Readings
from nemo_opd.losses.surprise import LIVE_COPIES, surprise
from nemo_opd.losses.term import Term, unit_cells
from nemo_opd.types import Mean, Metric

ESTIMATORS = ("k1", "k2", "k3")
UPDATES = ("policy_gradient", "direct")


@Loss
def sampled_kl(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    ids: Tensor,
    mask: Tensor,
    logprobs: Tensor | None = None,
    estimator: str = "k1",
    update: str = "policy_gradient",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    sequence_weights: Tensor | None = None,
    normalizer: float | None = None,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> PlannedLoss:
    """Σ over scored tokens, sampled from the student, of what lowers an estimate of KL(p ‖ q) / normalizer.

    METHODS §10. With s = log p(token) and t = log q(token), at temperature 1, the estimates are k1 = s − t,
    k2 = ½(s − t)² and k3 = exp(t − s) − 1 − (t − s), where t − s is cut at `LARGEST_LOG_RATIO`, beyond which a token
    has no gradient. update="direct" differentiates the estimate: in expectation k3 has the gradient of the forward
    KL(q ‖ p), k2 that of the reverse, and k1 none. update="policy_gradient" takes −estimate as the advantage A
    of the token, a constant, and is −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A) with r = exp(s − logprobs); with
    k1 its gradient in expectation is that of the reverse KL. logprobs [B, S]: of the sampled tokens by the model that
    sampled them, by default this one, so that r = 1; dual_clip: tokens of a negative A count dual_clip · A at most.

    Unshifted logits [B, S, V] of one vocabulary; ids and mask [B, S]: token i is scored, by the logits at i−1.
    sequence_weights [B]: of each sequence's tokens in the sum; those of weight 0 are left out. normalizer: scored
    tokens of the global batch, by default of this call. Metrics: `kd`, the mean of k3 in nats a token, which is 0 or
    more whatever the estimator; with update="policy_gradient" also `policy/clip_fraction` and `policy/ratio`. Raises
    ConfigError for shapes, sizes, names or bounds that do not fit.
    """
    _check(estimator, update)
    places = LabelPositions.of(
        student_logits,
        teacher_logits,
        mask=mask,
        sequence_weights=sequence_weights,
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=teacher_vocab_size,
    )
    check_positions(mask.shape, ids=ids, **({} if logprobs is None else {"logprobs": logprobs}))
    clip = Clip(clip_low, clip_high, dual_clip)
    targets = ids.flatten().index_select(0, places.rows + 1).long()
    behaviour = None if logprobs is None else logprobs.flatten().index_select(0, places.rows + 1)
    readings = Readings.of(places.student, len(places), 3)
    ahead = places.teacher_ahead()

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        s = -surprise(logits, targets[part])
        t = -surprise(ahead.of(part).to(logits.dtype), targets[part])
        estimate = _estimate(estimator, s, t)
        sampled_at = s.detach() if behaviour is None else behaviour[part].to(s.dtype)
        found = clip(s - sampled_at, -estimate)
        kd = _estimate("k3", s.detach(), t)
        readings.put(part, torch.stack([kd, found.ratio, found.is_clipped.to(s.dtype)], 1))
        return estimate if update == "direct" else found.loss

    def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
        kd, ratio, is_clipped = readings.found()
        of_ratio = clip_metrics(ratio, is_clipped) if update == "policy_gradient" else {}
        return {"kd": Mean(kd.sum(), len(places))} | of_ratio

    cells = unit_cells(len(places), 2 * LIVE_COPIES * places.size)
    term = Term(
        places.student_rows,
        loss_of,
        cells,
        places.size,
        weights=places.weights,
        chunk_size=chunk_size,
        ahead=ahead,
    )
    divisor = (len(places) if normalizer is None else normalizer) or 1
    return PlannedLoss(places.student, [term], 1 / divisor, metrics_of)


def _estimate(estimator: str, s: Tensor, t: Tensor) -> Tensor:
    """Of KL(p ‖ q), from log-probabilities [u] of student and teacher."""
    if estimator == "k1":
        return s - t
    if estimator == "k2":
        return (s - t).square() / 2
    log_ratio = (t - s).clamp(max=LARGEST_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def _check(estimator: str, update: str) -> None:
    for key, value, choices in (("estimator", estimator, ESTIMATORS), ("update", update, UPDATES)):
        if value not in choices:
            raise ConfigError(f"{key}={value!r}: there is no such {key}; choose from {', '.join(choices)}")
