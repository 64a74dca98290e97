"""KL between student and teacher, estimated on the sampled tokens (methods.md §10.4)."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.arguments import check_positions, without_none
from nemo_opd.losses.chunk_positions import ChunkPositions
from nemo_opd.losses.clipped_ratio import Clip
from nemo_opd.losses.importance import Importance
from nemo_opd.losses.kl_estimate import KLEstimate, SampledChunks
from nemo_opd.losses.label_positions import LabelPositions, TokenArguments
from nemo_opd.losses.realised_chunks import RealisedChunks


@Loss
def sampled_kl(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    ids: Tensor,
    logprobs: Tensor | None = None,
    behaviour_logprobs: Tensor | None = None,
    estimator: str = "k1",
    update: str = "policy_gradient",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    importance_level: str = "token",
    importance_cap: float | None = None,
    importance_veto: float | None = None,
    **shared: Unpack[TokenArguments],
) -> PlannedLoss:
    """Compute Σ loss of a KL(p ‖ q) estimate / normalizer over scored tokens sampled from the student.

    methods.md §10.4. With s = log p(token) and t = log q(token), at temperature 1, the estimates are k1 = s − t,
    k2 = ½(s − t)² and k3 = exp(d) − 1 − d with d = min(t − s, `LARGEST_LOG_RATIO`); tokens beyond that bound get no
    gradient. update="direct" differentiates the estimate: in expectation k3 has the gradient of the forward KL(q ‖ p),
    k2 of the reverse KL, and k1 none. update="policy_gradient" uses −estimate as the token's advantage A, a constant,
    in −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A) with r = exp(s − logprobs); with k1 its expected gradient is
    the reverse KL's. logprobs [B, S]: log-probabilities of the sampled tokens under the model that sampled them, by
    default the current model, so that r = 1. dual_clip: for tokens with a negative A the loss is at most −dual_clip ·
    A.

    behaviour_logprobs [B, S] (methods.md §11): log-probabilities under the sampling policy, after temperature, top-k
    and top-p, by default `logprobs`. A token's weight is W = p / π_behaviour, a constant. update="direct" multiplies
    the estimate by W, update="policy_gradient" its loss by W / r, so that the clip sees only the student's change since
    sampling. The expectations above then hold for every temperature and for samples of older weights, unless a ratio is
    clipped; with top-k or top-p they hold for the generalised KL over the set S of tokens that can be sampled, Σ_S [p
    log(p/q) − p + q], with S as a constant. importance_cap=C: weights are at most C. importance_level="sequence": each
    token gets the product of its sequence's weights, at most C, instead of its weight.
    importance_veto: a sequence with a token of a smaller weight is dropped but stays in the normalizer.

    Unshifted logits [B, S, V] of one vocabulary; ids and mask [B, S]: token i is scored by the logits at i−1. Metrics:
    `kd`, the mean of W · k3 in nats per token, ≥ 0 for every estimator; with update="policy_gradient" also
    `policy/clip_fraction` and `policy/ratio`; and the metrics of `Importance.metrics`. Raises ConfigError for shapes,
    sizes, names or bounds that do not fit. Across tokenizers: `sampled_chunk_kl`.
    """
    importance = Importance(importance_level, importance_cap, importance_veto)
    estimate = KLEstimate(estimator, update, Clip(clip_low, clip_high, dual_clip), importance)
    places = LabelPositions.of(student_logits, teacher_logits, takes_truncated=True, **shared)
    mask = shared["mask"]
    check_positions(mask.shape, ids=ids, **without_none(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs))
    tokens = ChunkPositions.single(places.rows)
    targets = tokens.targets(ids)
    sampled = SampledChunks(
        places.student,
        RealisedChunks(ChunkPositions.single(places.student_rows), targets),
        RealisedChunks(tokens, targets),
        places.teacher_ahead(),
        places.size,
        places.size,
        None if logprobs is None else tokens.of_tokens(logprobs),
        None if behaviour_logprobs is None else tokens.of_tokens(behaviour_logprobs),
        places.sequences,
        importance.of_sequences(
            places.student,
            ids=ids,
            mask=mask,
            behaviour=logprobs if behaviour_logprobs is None else behaviour_logprobs,
            vocab_size=places.size,
        ),
        places.weights,
    )
    return estimate.plan(sampled, places.normalizer, places.chunk_size)
