"""The training objective: weighted cross-entropy, distillation and policy gradient of rewards (methods.md §7.3)."""

from collections.abc import Collection, Sequence
from typing import Literal

from torch import Tensor

from nemo_opd.aggregation.parts import Divisor, TeacherLosses
from nemo_opd.config.objective import GRPOLoss, Objective
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.cross_entropy import cross_entropy
from nemo_opd.losses.policy_gradient import grpo
from nemo_opd.losses.reduction import label_mask, sampled_mask
from nemo_opd.types import Batch, Normalizers, SampledRows

TermName = Literal["ce", "kd", "policy"]
TERMS: tuple[TermName, ...] = ("ce", "kd", "policy")


class ObjectiveTerms:
    """Planner of the objective's terms for rows of a batch."""

    def __init__(self, settings: Objective, parts: TeacherLosses, vocab_size: int) -> None:
        """Store the settings. vocab_size: size of the student's tokenizer."""
        self._settings = settings
        self._parts = parts
        self._vocab_size = vocab_size

    def plan(
        self,
        logits: Tensor | LogitRows,
        teacher_logits: Sequence[LogitRows],
        batch: Batch,
        divisors: Sequence[Divisor],
        normalizers: Normalizers,
        *,
        kd_scale: float = 1.0,
        terms: Collection[TermName] = TERMS,
    ) -> list[PlannedLoss]:
        """Plan the selected terms, multiplied by their weights: cross-entropy, each part of KD, the policy gradient.

        Student logits [B, S, V], teacher logits [B, T, W], batch and divisors (`Parts.divisors`) cover the same rows;
        normalizers cover the global batch. kd_scale: extra factor of the KD. Rows without samples have no policy
        gradient.
        """
        losses = []
        if "ce" in terms:
            losses.append(self._cross_entropy(logits, batch, normalizers.ce))
        if "kd" in terms:
            parts = self._parts.plan(logits, teacher_logits, batch, divisors, normalizers.kd)
            losses += [part.times(self._settings.kd_weight * kd_scale) for part in parts]
        if "policy" in terms and batch.sampled is not None and isinstance(self._settings, GRPOLoss):
            losses.append(self._policy(logits, batch, batch.sampled, self._settings, normalizers.policy))
        return losses

    def _cross_entropy(self, logits: Tensor | LogitRows, batch: Batch, normalizer: float) -> PlannedLoss:
        mask, size = label_mask(batch), self._vocab_size
        ce = cross_entropy.plan(logits, batch.student.ids, mask=mask, normalizer=normalizer, vocab_size=size)
        return ce.times(self._settings.ce_weight)

    def _policy(
        self, logits: Tensor | LogitRows, batch: Batch, sampled: SampledRows, settings: GRPOLoss, normalizer: float
    ) -> PlannedLoss:
        policy = grpo.plan(
            logits,
            ids=batch.student.ids,
            mask=sampled_mask(batch.student.loss_mask, sampled),
            logprobs=sampled.logprobs,
            behaviour_logprobs=sampled.behaviour_logprobs,
            advantages=sampled.advantages,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            importance_level=settings.importance_level,
            importance_cap=settings.importance_cap,
            importance_veto=settings.importance_veto,
            normalizer=normalizer,
            vocab_size=self._vocab_size,
        )
        return policy.times(settings.policy_weight)
