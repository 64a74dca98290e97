"""KL between student and teacher, estimated on the sampled tokens (methods.md §10.4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError, check_choice
from nemo_opd.logits.planned import Loss, PlannedLoss, Readings
from nemo_opd.logits.rows import LogitRows, TrainableRows
from nemo_opd.logits.term import ReadAhead, Term, unit_cells
from nemo_opd.losses.arguments import LabelPositions, TokenArguments, check_positions
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs, ChunkPositions, RealisedChunks
from nemo_opd.losses.cross_entropy import LIVE_COPIES
from nemo_opd.losses.importance import (
    LARGEST_LOG_RATIO,
    NUM_READINGS,
    Clip,
    Importance,
    SequenceImportance,
    Weighted,
    clip_metrics,
)
from nemo_opd.types import Mean, Metric

_SMALLEST_LOG_LIKELIHOOD = 1e-8
"""Chunks that the student finds more certain than this have equal shares, as the log-probabilities are rounding."""


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
    shares: str = "chunk",
    advantage_clamp: float | None = None,
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
    advantage_clamp: bound of |A|. shares: as for `sampled_chunk_kl`; without effect here.

    Unshifted logits [B, S, V] of one vocabulary; ids and mask [B, S]: token i is scored by the logits at i−1. Metrics:
    `kd`, the mean of W · k3 in nats per token, ≥ 0 for every estimator; with update="policy_gradient" also
    `policy/clip_fraction` and `policy/ratio`; and the metrics of `Importance.metrics`. Raises ConfigError for shapes,
    sizes, names or bounds that do not fit. Across tokenizers: `sampled_chunk_kl`.
    """
    importance = Importance(importance_level, importance_cap, importance_veto)
    clip = Clip(clip_low, clip_high, dual_clip)
    estimate = _KLEstimate(estimator, update, clip, importance, shares, advantage_clamp)
    places = LabelPositions.of(student_logits, teacher_logits, takes_truncated=True, **shared)
    mask = shared["mask"]
    check_positions(mask.shape, ids=ids, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs)
    tokens = ChunkPositions.single(places.rows)
    targets = tokens.targets(ids)
    sampled = _SampledChunks(
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


@Loss
def sampled_chunk_kl(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    mask: Tensor | None = None,
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
    shares: str = "chunk",
    advantage_clamp: float | None = None,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute `sampled_kl` with a chunk as one action: Σ over sampled chunks of the loss of a KL estimate / normalizer.

    s = Σ log p(token) over a chunk's student tokens and t = Σ log q(token) over its teacher tokens, at temperature 1.
    With these, k1, k2, k3, the advantage A = −estimate and −min(r A, clip(r) A) are defined as in `sampled_kl`;
    r = exp(s − Σ logprobs) is the chunk's ratio, the importance weight of that action. With one token per chunk and
    side this is `sampled_kl`.

    Expectation, unless a ratio is clipped: let P(a|h) be the student's probability of writing the tokens a after h,
    Q(a|h) the probability of the teacher's tokens for the same bytes, and ρ(a|h) the probability that a, once written,
    is a unit. With ρ, Q and the probability of h as constants, k1 with policy_gradient and k2 with direct have the
    gradient of E_h Σ_a ρ [P log(P/Q) − P + Q], which is ≥ 0 and estimated by the metric `kd`; k3 with direct has the
    gradient of E_h Σ_a ρ [Q log(Q/P) − Q + P]. If every student token is a chunk, ρ is 1 and these are the gradients of
    the reverse and forward KL of its next tokens. P counts only the sampled tokens, not all spellings of the bytes, and
    Q only the teacher's tokenization; see docs/losses.md.

    logprobs [B, S]: log-probabilities of the sampled tokens under the model that sampled them, by default the current
    model; behaviour_logprobs, importance_*: as for `sampled_kl`, W being the product over the chunk's tokens. mask
    [B, S]: sampled tokens that count for weights and vetoes of sequences; by default the tokens in chunks.

    shares, with update="policy_gradient": "chunk" is the above. Otherwise each student token is an action, with its own
    ratio and importance weight, and its share a_i of the chunk's advantage, Σ a_i = 1: "equal", or "logprobs" in
    proportion to log p(token). advantage_clamp: bound of each action's |A|. A chunk's loss is the sum over its tokens.

    Metrics: as for `sampled_kl`, `kd` per chunk, those of ratios and weights per action. Raises ConfigError for shapes,
    sizes, names or bounds that do not fit.
    """
    importance = Importance(importance_level, importance_cap, importance_veto)
    clip = Clip(clip_low, clip_high, dual_clip)
    estimate = _KLEstimate(estimator, update, clip, importance, shares, advantage_clamp)
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=1.0, **shared)
    check_positions(inputs.student.shape, mask=mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs)
    units = inputs.units
    student = RealisedChunks.of(units.student_rows, units.student_lengths, inputs.student_ids)
    teacher = RealisedChunks.of(units.teacher_rows, units.teacher_lengths, inputs.teacher_ids)
    sampled = _SampledChunks(
        inputs.student,
        student,
        teacher,
        inputs.teacher_ahead(teacher.positions.rows, teacher.positions.offsets),
        inputs.student_size,
        inputs.teacher_size,
        None if logprobs is None else student.positions.of_tokens(logprobs),
        None if behaviour_logprobs is None else student.positions.of_tokens(behaviour_logprobs),
        units.student_rows // inputs.student.shape[1],
        importance.of_sequences(
            inputs.student,
            ids=inputs.student_ids,
            mask=shared["student_chunk_id"] >= 0 if mask is None else mask,
            behaviour=logprobs if behaviour_logprobs is None else behaviour_logprobs,
            vocab_size=inputs.student_size,
        ),
        inputs.weights,
    )
    return estimate.plan(sampled, inputs.normalizer, inputs.chunk_size)


@dataclass(frozen=True, slots=True)
class _KLEstimate:
    """KL estimator with its update rule. Raises ConfigError for unknown names, or direct with sequence weights."""

    estimator: str
    update: str
    clip: Clip
    importance: Importance
    shares: str
    advantage_clamp: float | None

    def __post_init__(self) -> None:
        check_choice("estimator", self.estimator, ("k1", "k2", "k3"))
        check_choice("update", self.update, ("policy_gradient", "direct"))
        check_choice("shares", self.shares, ("chunk", "equal", "logprobs"))
        if self.update == "direct" and self.importance.level == "sequence":
            raise ConfigError(
                "importance_level='sequence' weighs policy gradients, and update='direct' differentiates the estimate "
                "of each unit; use update='policy_gradient', or importance_level='token'"
            )
        if self.update == "direct" and self.shares != "chunk":
            raise ConfigError(
                f"shares={self.shares!r} divides an advantage, which update='direct' does not have; use "
                "update='policy_gradient', or shares='chunk'"
            )
        if self.update == "direct" and self.advantage_clamp is not None:
            raise ConfigError(
                f"advantage_clamp={self.advantage_clamp} bounds an advantage, which update='direct' does not have; use "
                "update='policy_gradient', or None"
            )
        if self.advantage_clamp is not None and not self.advantage_clamp > 0:
            raise ConfigError(
                f"advantage_clamp={self.advantage_clamp} leaves no advantage; give a number above 0, or None"
            )

    def plan(self, chunks: _SampledChunks, normalizer: float | None, chunk_size: int | None) -> PlannedLoss:
        """Plan the sum over units / normalizer, by default the number of units. chunk_size: units per block."""
        student, teacher, num_units = chunks.student, chunks.teacher, len(chunks)
        acting = chunks if self.shares == "chunk" else chunks.tokens
        readings = Readings.of(chunks.source, len(acting), 3 + NUM_READINGS)

        def loss_of(logits: Tensor, part: slice) -> Tensor:
            log_p = student.log_probabilities(logits, part)
            s = student.positions.sum(log_p, part)
            t = teacher.log_likelihood(chunks.ahead.of(part).to(logits.dtype), part)
            estimate = _estimate_kl(self.estimator, s, t)
            weights = self._weights(chunks, s.detach(), part)
            # Include clipped and dropped units: no gradient does not mean zero KL.
            kd = weights.unit_weight * _estimate_kl("k3", s.detach(), t)
            actions, log_action, advantage = part, s, -estimate
            if self.shares != "chunk":
                actions, log_action = student.positions.span(part), log_p
                shares = self._shares(log_p.detach(), student.positions, part)
                advantage = student.positions.repeated(advantage, part) * shares
                weights = self._weights(acting, log_p.detach(), actions)
                kd = student.positions.repeated(kd / student.positions.lengths[part], part)
            if self.advantage_clamp is not None:
                advantage = advantage.clamp(-self.advantage_clamp, self.advantage_clamp)
            surrogate = self.clip(log_action - acting.proximal(log_action, actions), advantage)
            ratio_readings = torch.stack([kd, surrogate.ratio, surrogate.is_clipped.to(s.dtype)], 1)
            readings.put(actions, torch.cat([ratio_readings, weights.readings()], 1))
            if self.update == "direct":
                return weights.used * estimate
            losses = weights.factor * surrogate.loss
            return losses if self.shares == "chunk" else student.positions.sum(losses, part)

        def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
            (kd, ratio, is_clipped), weight_readings = readings.gather().tensor_split([3])
            kd_metric: dict[str, Metric] = {"kd": Mean(kd.sum(), num_units)}
            ratio_metrics = clip_metrics(ratio, is_clipped) if self.update == "policy_gradient" else {}
            return kd_metric | ratio_metrics | self.importance.metrics(weight_readings, chunks.importance)

        student_cells = (student.positions.offsets, LIVE_COPIES * chunks.student_size)
        teacher_cells = (teacher.positions.offsets, LIVE_COPIES * chunks.teacher_size)
        term = Term(
            student.positions.rows,
            loss_of,
            unit_cells(num_units, 1, student_cells, teacher_cells),
            chunks.student_size,
            student.positions.offsets,
            chunks.weights,
            chunk_size=chunk_size,
            ahead=chunks.ahead,
        )
        divisor = (num_units if normalizer is None else normalizer) or 1
        return PlannedLoss(chunks.source, [term], 1 / divisor, metrics_of)

    def _shares(self, log_p: Tensor, positions: ChunkPositions, part: slice) -> Tensor:
        """Return each token's share of its chunk's advantage, from the tokens' log-probabilities [r]."""
        equal = positions.repeated(1 / positions.lengths[part].to(log_p.dtype), part)
        if self.shares == "equal":
            return equal
        total = positions.repeated(positions.sum(log_p, part), part)
        return torch.where(total.abs() < _SMALLEST_LOG_LIKELIHOOD, equal, log_p / total)

    def _weights(self, chunks: _SampledChunks, s: Tensor, part: slice) -> Weighted:
        units = chunks.sequences[part]
        proximal, behaviour = chunks.proximal(s, part), chunks.behaviour(s, part)
        return self.importance.applied(s, proximal, behaviour, chunks.importance, units)


@dataclass(frozen=True, slots=True)
class _SampledChunks:
    """Units, each a run of sampled student tokens with the teacher's tokens for the same text."""

    source: TrainableRows
    """The student's logits."""
    student: RealisedChunks
    teacher: RealisedChunks
    ahead: ReadAhead
    """Reader of the teacher's logits at its tokens."""
    student_size: int
    teacher_size: int
    logprobs: Tensor | None
    """[R]: the student tokens' log-probabilities under the model that sampled them, or None for the current model."""
    behaviour_logprobs: Tensor | None
    """[R]: log-probabilities under the sampling policy, or None if equal to `logprobs`."""
    sequences: Tensor
    """int64 [U]: each unit's sequence."""
    importance: SequenceImportance | None
    """Importance of sequences, or None if it is not needed."""
    weights: Tensor | None
    """[U], or None if all are 1."""

    def __len__(self) -> int:
        return len(self.student)

    @property
    def tokens(self) -> _SampledChunks:
        """The student's tokens, each a unit by itself; `ahead` and `weights` stay those of the chunks."""
        positions = self.student.positions
        return replace(
            self,
            student=RealisedChunks(ChunkPositions.single(positions.rows), self.student.targets),
            sequences=positions.per_position(self.sequences),
        )

    def proximal(self, s: Tensor, part: slice) -> Tensor:
        """Return units' log-probabilities [u] under the model that sampled them. s: under the current student."""
        return s.detach() if self.logprobs is None else self._unit_sums(self.logprobs, s, part)

    def behaviour(self, s: Tensor, part: slice) -> Tensor:
        """Return units' log-probabilities [u] under the sampling policy."""
        if self.behaviour_logprobs is None:
            return self.proximal(s, part)
        return self._unit_sums(self.behaviour_logprobs, s, part)

    def _unit_sums(self, token_values: Tensor, s: Tensor, part: slice) -> Tensor:
        positions = self.student.positions
        return positions.sum(token_values[positions.span(part)].to(s.dtype), part)


def _estimate_kl(estimator: str, s: Tensor, t: Tensor) -> Tensor:
    """Estimate KL(p ‖ q) from log-probabilities [u] of student and teacher."""
    if estimator == "k1":
        return s - t
    if estimator == "k2":
        return (s - t).square() / 2
    log_ratio = (t - s).clamp(max=LARGEST_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio
