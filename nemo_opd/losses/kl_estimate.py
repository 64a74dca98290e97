"""Estimates of KL(p ‖ q) on tokens that the student sampled, and their losses (methods.md §10.4)."""

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
    """Runs of tokens that the student sampled, each paired with the teacher's tokens for it. A unit is one run."""

    source: TrainableRows
    """The student's logits."""
    student: RealisedChunks
    teacher: RealisedChunks
    ahead: ReadAhead
    """The teacher's logits at its tokens."""
    student_size: int
    teacher_size: int
    logprobs: Tensor | None
    """[R]: of the student's tokens by the model that sampled them; None: by this one."""
    behaviour_logprobs: Tensor | None
    """[R]: by the policy that sampled them; None: `logprobs`."""
    sequences: Tensor
    """int64 [U]: which sequence each is of."""
    importance: SequenceImportance | None
    """Importance of whole sequences; None where it is not needed."""
    weights: Tensor | None
    """[U]; None: all 1."""

    def __len__(self) -> int:
        return len(self.student)

    def proximal(self, s: Tensor, part: slice) -> Tensor:
        """Return log-probabilities [u] of units by the model that sampled them; s: by the student now."""
        return s.detach() if self.logprobs is None else self._of_units(self.logprobs, s, part)

    def behaviour(self, s: Tensor, part: slice) -> Tensor:
        """Return log-probabilities [u] by the policy that sampled them."""
        if self.behaviour_logprobs is None:
            return self.proximal(s, part)
        return self._of_units(self.behaviour_logprobs, s, part)

    def _of_units(self, of_tokens: Tensor, s: Tensor, part: slice) -> Tensor:
        positions = self.student.positions
        return positions.sum(of_tokens[positions.span(part)].to(s.dtype), part)


@dataclass(frozen=True, slots=True)
class KLEstimate:
    """Estimator and update. Raises ConfigError for unknown names."""

    estimator: str
    """One of _ESTIMATORS."""
    update: str
    """One of _UPDATES."""
    clip: Clip
    importance: Importance

    def __post_init__(self) -> None:
        for key, value, choices in (("estimator", self.estimator, _ESTIMATORS), ("update", self.update, _UPDATES)):
            if value not in choices:
                raise ConfigError(f"{key}={value!r}: there is no such {key}; choose from {', '.join(choices)}")
        if self.update == "direct" and self.importance.level == "sequence":
            raise ConfigError(
                "importance_level='sequence' weighs policy gradients, and update='direct' differentiates the estimate "
                "of each unit; use update='policy_gradient', or importance_level='token'"
            )

    def plan(self, chunks: SampledChunks, normalizer: float | None, chunk_size: int | None) -> PlannedLoss:
        """Plan the sum over units / normalizer, by default their number. chunk_size: units computed at a time."""
        student, teacher, num_units = chunks.student, chunks.teacher, len(chunks)
        readings = Readings.of(chunks.source, num_units, 3 + NUM_READINGS)

        def loss_of(logits: Tensor, part: slice) -> Tensor:
            s = student.log_likelihood(logits, part)
            t = teacher.log_likelihood(chunks.ahead.of(part).to(logits.dtype), part)
            estimate = _estimated(self.estimator, s, t)
            weighted = self._weighted(chunks, s.detach(), part)
            found = self.clip(s - chunks.proximal(s, part), -estimate)
            # Of cut and dropped units too: that they train nothing does not mean that the KL there is 0.
            kd = weighted.of_unit * _estimated("k3", s.detach(), t)
            of_ratio = torch.stack([kd, found.ratio, found.is_clipped.to(s.dtype)], 1)
            readings.put(part, torch.cat([of_ratio, weighted.readings()], 1))
            return weighted.used * estimate if self.update == "direct" else weighted.factor * found.loss

        def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
            (kd, ratio, is_clipped), of_weights = readings.found().tensor_split([3])
            of_ratio = clip_metrics(ratio, is_clipped) if self.update == "policy_gradient" else {}
            return {"kd": Mean(kd.sum(), num_units)} | of_ratio | self.importance.metrics(of_weights, chunks.importance)

        of_student = (student.positions.offsets, LIVE_COPIES * chunks.student_size)
        of_teacher = (teacher.positions.offsets, LIVE_COPIES * chunks.teacher_size)
        term = Term(
            student.positions.rows,
            loss_of,
            unit_cells(num_units, 1, of_student, of_teacher),
            chunks.student_size,
            student.positions.offsets,
            chunks.weights,
            chunk_size=chunk_size,
            ahead=chunks.ahead,
        )
        divisor = (num_units if normalizer is None else normalizer) or 1
        return PlannedLoss(chunks.source, [term], 1 / divisor, metrics_of)

    def _weighted(self, chunks: SampledChunks, s: Tensor, part: slice) -> Weighted:
        units = chunks.sequences[part]
        proximal, behaviour = chunks.proximal(s, part), chunks.behaviour(s, part)
        return self.importance.applied(s, proximal, behaviour, chunks.importance, units)


def _estimated(estimator: str, s: Tensor, t: Tensor) -> Tensor:
    """Estimate KL(p ‖ q) from log-probabilities [u] of student and teacher."""
    if estimator == "k1":
        return s - t
    if estimator == "k2":
        return (s - t).square() / 2
    log_ratio = (t - s).clamp(max=LARGEST_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio
