"""Estimates of KL(p ‖ q) on tokens sampled from the student, and their losses (methods.md §10.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.read_ahead import ReadAhead
from nemo_opd.logits.readings import Readings
from nemo_opd.logits.rows import TrainableRows
from nemo_opd.logits.term import Term, unit_cells
from nemo_opd.losses.clipped_ratio import LARGEST_LOG_RATIO, Clip, clip_metrics
from nemo_opd.losses.importance import NUM_READINGS, Importance, SequenceImportance, Weighted
from nemo_opd.losses.realised_chunks import RealisedChunks
from nemo_opd.losses.surprise import LIVE_COPIES
from nemo_opd.types import Mean, Metric

_ESTIMATORS = ("k1", "k2", "k3")
_UPDATES = ("policy_gradient", "direct")


@dataclass(frozen=True, slots=True)
class SampledChunks:
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


@dataclass(frozen=True, slots=True)
class KLEstimate:
    """KL estimator with its update rule. Raises ConfigError for unknown names, or direct with sequence weights."""

    estimator: str
    """One of _ESTIMATORS."""
    update: str
    """One of _UPDATES."""
    clip: Clip
    importance: Importance

    def __post_init__(self) -> None:
        for key, value, choices in (("estimator", self.estimator, _ESTIMATORS), ("update", self.update, _UPDATES)):
            if value not in choices:
                raise ConfigError(f"{key}={value!r} is unknown; choose from {', '.join(choices)}")
        if self.update == "direct" and self.importance.level == "sequence":
            raise ConfigError(
                "importance_level='sequence' weighs policy gradients, and update='direct' differentiates the estimate "
                "of each unit; use update='policy_gradient', or importance_level='token'"
            )

    def plan(self, chunks: SampledChunks, normalizer: float | None, chunk_size: int | None) -> PlannedLoss:
        """Plan the sum over units / normalizer, by default the number of units. chunk_size: units per block."""
        student, teacher, num_units = chunks.student, chunks.teacher, len(chunks)
        readings = Readings.of(chunks.source, num_units, 3 + NUM_READINGS)

        def loss_of(logits: Tensor, part: slice) -> Tensor:
            s = student.log_likelihood(logits, part)
            t = teacher.log_likelihood(chunks.ahead.of(part).to(logits.dtype), part)
            estimate = _estimate_kl(self.estimator, s, t)
            weights = self._weights(chunks, s.detach(), part)
            surrogate = self.clip(s - chunks.proximal(s, part), -estimate)
            # Include clipped and dropped units: no gradient does not mean zero KL.
            kd = weights.unit_weight * _estimate_kl("k3", s.detach(), t)
            ratio_readings = torch.stack([kd, surrogate.ratio, surrogate.is_clipped.to(s.dtype)], 1)
            readings.put(part, torch.cat([ratio_readings, weights.readings()], 1))
            return weights.used * estimate if self.update == "direct" else weights.factor * surrogate.loss

        def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
            (kd, ratio, is_clipped), weight_readings = readings.found().tensor_split([3])
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

    def _weights(self, chunks: SampledChunks, s: Tensor, part: slice) -> Weighted:
        units = chunks.sequences[part]
        proximal, behaviour = chunks.proximal(s, part), chunks.behaviour(s, part)
        return self.importance.applied(s, proximal, behaviour, chunks.importance, units)


def _estimate_kl(estimator: str, s: Tensor, t: Tensor) -> Tensor:
    """Estimate KL(p ‖ q) from log-probabilities [u] of student and teacher."""
    if estimator == "k1":
        return s - t
    if estimator == "k2":
        return (s - t).square() / 2
    log_ratio = (t - s).clamp(max=LARGEST_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio
