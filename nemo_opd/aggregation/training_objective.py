"""The training objective: cross-entropy, the teachers' losses and policy gradient (methods.md §6, §7.3)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.aggregation.rules import RULES, Overlap
from nemo_opd.config.objective import GRPOLoss, Objective
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.transfer import compute_on_host
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.rows import LogitRows, logit_rows
from nemo_opd.logits.sources import AveragedLogits
from nemo_opd.losses.arguments import count_label_tokens, label_mask, sampled_mask
from nemo_opd.losses.cross_entropy import cross_entropy
from nemo_opd.losses.learned_projection import LearnedProjection
from nemo_opd.losses.logit_metrics import plan_rollout_statistics, teacher_images, with_image_mass
from nemo_opd.losses.policy_gradient import grpo
from nemo_opd.losses.position_targets import POSITION_KINDS, position_kinds
from nemo_opd.losses.term_loss import TermLoss, build
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.types import Batch, Mean, Metric, Normalizers, SampledRows, TeacherRows, TokenRows

PART = "kd_part/"
"""Prefix of metrics that add up to the trained KD, each multiplied by its SHARE metric if there is one."""
SHARE = "kd_share/"
"""Prefix of metrics with the share of texts that have the part's kind of unit; absent if all units count alike."""


@dataclass(frozen=True, slots=True)
class Divisor:
    """Divisor of a part's sum over some rows: count / share (methods.md §6.5)."""

    count: float
    """Tokens or units of the part, or of all parts that count alike."""
    share: Mean | None = None
    """Texts with such units / texts with any unit. None if all units count alike."""

    @property
    def value(self) -> float:
        """count / share; 1 without units, because the sum is then 0."""
        share = 1.0 if self.share is None else self.share.value()
        return self.count / share if self.count else 1.0


@dataclass(frozen=True, slots=True)
class TeacherLoss:
    """One summand of KD: weight · loss."""

    name: str | None
    """The teacher's name, or None for averaged logits."""
    weight: float
    loss: TermLoss
    teacher: int
    """Index of the teacher whose rows of a batch it reads; 0 for averaged logits."""
    logits_of: Callable[[Sequence[LogitRows]], LogitRows]
    """Function from the logits of all teachers to the logits that this part reads."""
    overlap: Overlap | None = None
    """None if teacher and student have no token in common."""
    images: NDArray[np.bool_] | None = None
    """[W]: teacher tokens that the loss maps into the student's vocabulary; None if it uses no map."""

    def rows(self, batch: Batch) -> tuple[TokenRows, TeacherRows, SampledRows | None]:
        """Return the rows of a batch that the methods of `loss` take."""
        return self.student_side(batch), batch.teachers[self.teacher], batch.sampled

    def student_side(self, batch: Batch) -> TokenRows:
        """Return the student's tokens that are compared; with averaged logits, only tokens that all teachers score."""
        student = batch.teachers[self.teacher].student_side(batch.student)
        if self.name is not None or all(rows.moved is None for rows in batch.teachers):
            return student
        masks = [rows.student_side(batch.student).loss_mask for rows in batch.teachers]
        (mask,) = compute_on_host(lambda *masks: [torch.stack(masks).all(0)], *masks)
        return replace(student, loss_mask=mask)

    def plan(
        self,
        student_logits: Tensor | LogitRows,
        teacher_logits: Sequence[LogitRows],
        batch: Batch,
        divisor: Divisor,
        normalizer: float,
    ) -> PlannedLoss:
        """Plan weight · loss of these rows / normalizer.

        divisor: the divisor of these rows, for metrics only. Metrics: those that the loss reports, suffixed with the
        teacher's name, and the part's contribution to KD under PART and SHARE.
        """
        rows, teacher = batch.teachers[self.teacher], self.logits_of(teacher_logits)
        loss = self.loss.plan(
            student_logits,
            teacher,
            self.student_side(batch),
            rows,
            normalizer,
            sampled=batch.sampled,
            sequence_weights=_sequence_weights(rows),
        )
        if self.images is not None and rows.chunks is not None and not logit_rows(teacher).is_truncated:
            loss = with_image_mass(loss, self.images, rows.chunks.student)

        def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
            metrics = {self._named(name): metric for name, metric in loss.metrics_of(weighted, unweighted).items()}
            share = {} if divisor.share is None else {f"{SHARE}{self.teacher}": divisor.share}
            return metrics | share | {f"{PART}{self.teacher}": Mean(self.weight * weighted, divisor.count)}

        return replace(loss.times(self.weight), metrics_of=metrics_of)

    def plan_overlap(
        self, student_logits: Tensor | LogitRows, teacher_logits: Sequence[LogitRows], batch: Batch
    ) -> list[PlannedLoss]:
        """Plan the overlap of both sides' likeliest tokens, in the student's samples if there are any.

        Return an empty list without common tokens, and for truncated teacher logits.
        """
        teacher = logit_rows(self.logits_of(teacher_logits))
        if self.overlap is None or teacher.is_truncated:
            return []
        rows = batch.teachers[self.teacher]
        plan = self.overlap.plan(student_logits, teacher, self.student_side(batch), rows, batch.sampled)

        def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
            return {self._named(name): metric for name, metric in plan.metrics_of(weighted, unweighted).items()}

        return [replace(plan, metrics_of=metrics_of)]

    def _named(self, metric: str) -> str:
        return metric if self.name is None else f"{metric}/{self.name}"


TermName = Literal["ce", "kd", "policy"]
TERMS: tuple[TermName, ...] = ("ce", "kd", "policy")


@dataclass(frozen=True, slots=True)
class TrainingObjective:
    """Planner of a run's objective for rows of a batch (methods.md §7.3): cross-entropy, KD (§6), policy gradient."""

    settings: Objective
    parts: tuple[TeacherLoss, ...]
    """Summands of KD."""
    count_together: bool
    """True: each text has one teacher, and KD is (6.2) of methods.md §6.5. False: KD is the sum of the parts, each with
    its own divisor.
    """
    vocab_size: int
    """Size of the student's tokenizer."""

    def counts(self, batch: Batch) -> list[float]:
        """Return the counts behind the normalizers: label tokens, sampled tokens, tokens or units and texts per part.

        The counts of a global batch are the sums of its shards' counts.
        """
        masks = label_mask(batch), sampled_mask(batch.student.loss_mask, batch.sampled)
        tokens = [int(count_label_tokens(mask).sum()) for mask in masks]
        return [*tokens, *self._kd_counts(batch), *self._texts(batch)]

    def divisors(self, batch: Batch) -> tuple[Divisor, ...]:
        """Return one divisor per part for these rows."""
        return self._divisors(self._kd_counts(batch), self._texts(batch))

    def _kd_counts(self, batch: Batch) -> list[float]:
        return [part.loss.count(*part.rows(batch)) for part in self.parts]

    def _texts(self, batch: Batch) -> list[float]:
        """Count the texts of each part that have a unit; zeros if the divisors do not need them."""
        if not self._has_several_kinds:
            return [0] * len(self.parts)
        return [int((part.loss.units(*part.rows(batch)) > 0).sum()) for part in self.parts]

    @property
    def _has_several_kinds(self) -> bool:
        return self.count_together and len({part.loss.unit for part in self.parts}) > 1

    def _divisors(self, counts: Sequence[float], texts: Sequence[float]) -> tuple[Divisor, ...]:
        if not self.count_together:
            return tuple(map(Divisor, counts))
        if not self._has_several_kinds:
            return (Divisor(sum(counts)),) * len(counts)
        kinds = [part.loss.unit for part in self.parts]
        return tuple(
            Divisor(_sum_of_kind(kind, counts, kinds), Mean(_sum_of_kind(kind, texts, kinds), sum(texts)))
            for kind in kinds
        )

    def normalizers(self, batch: Batch) -> Normalizers:
        """Return the normalizers of a global batch; 1 for a part without units."""
        return self.normalizers_of(self.counts(batch))

    def normalizers_of(self, counts: Sequence[float]) -> Normalizers:
        """Return the normalizers of a global batch with these `counts`."""
        labels, sampled, *part_counts = counts
        kd_counts, texts = part_counts[: len(self.parts)], part_counts[len(self.parts) :]
        divisors = self._divisors(kd_counts, texts)
        return Normalizers(int(labels) or 1, tuple(divisor.value for divisor in divisors), int(sampled) or 1)

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

        Student logits [B, S, V], teacher logits [B, T, W], batch and divisors (`divisors`) cover the same rows;
        normalizers cover the global batch. kd_scale: extra factor of the KD. Rows without samples have no policy
        gradient.
        """
        losses = []
        if "ce" in terms:
            ids, mask, size = batch.student.ids, label_mask(batch), self.vocab_size
            ce = cross_entropy.plan(logits, ids, mask=mask, normalizer=normalizers.ce, vocab_size=size)
            losses.append(ce.times(self.settings.ce_weight))
        if "kd" in terms:
            losses += [
                part.plan(logits, teacher_logits, batch, divisor, normalizer).times(self.settings.kd_weight * kd_scale)
                for part, divisor, normalizer in zip(self.parts, divisors, normalizers.kd, strict=True)
            ]
        if "policy" in terms and batch.sampled is not None and isinstance(self.settings, GRPOLoss):
            losses.append(self._policy(logits, batch, batch.sampled, self.settings, normalizers.policy))
        return losses

    def plan_statistics(
        self, student_logits: Tensor | LogitRows, teacher_logits: Sequence[LogitRows], batch: Batch
    ) -> list[PlannedLoss]:
        """Plan statistics of the sampled rows, none without samples.

        See `plan_rollout_statistics`, and `overlap/<teacher>` (methods.md §10.7).
        """
        if batch.sampled is None:
            return []
        statistics = plan_rollout_statistics(student_logits, batch.student, batch.sampled, vocab_size=self.vocab_size)
        return [statistics, *self.plan_overlaps(student_logits, teacher_logits, batch)]

    def plan_overlaps(
        self, student_logits: Tensor | LogitRows, teacher_logits: Sequence[LogitRows], batch: Batch
    ) -> list[PlannedLoss]:
        """Plan `overlap/<teacher>` over the sampled rows, or over all rows of a batch without samples."""
        return [plan for part in self.parts for plan in part.plan_overlap(student_logits, teacher_logits, batch)]

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
            vocab_size=self.vocab_size,
        )
        return policy.times(settings.policy_weight)


def _sequence_weights(rows: TeacherRows) -> Tensor | None:
    """Return the factor of each sequence's units, float32 [B], or None if it is 1."""
    if rows.weights is None or rows.rollout_weights is None:
        return rows.rollout_weights if rows.weights is None else rows.weights
    return compute_on_host(
        lambda weights, rollout_weights: [weights * rollout_weights], rows.weights, rows.rollout_weights
    )[0]


def _sum_of_kind(kind: str, values: Sequence[float], kinds: Sequence[str]) -> float:
    return sum(value for value, value_kind in zip(values, kinds, strict=True) if value_kind == kind)


def kd_of(metrics: Mapping[str, Metric]) -> float:
    """Compute the trained KD from the metrics under PART and SHARE."""
    total = 0.0
    for name, metric in metrics.items():
        if name.startswith(PART):
            share = metrics.get(SHARE + name.removeprefix(PART))
            total += metric.value() * (1.0 if share is None else share.value())
    return total


def build_objective(
    config: RunConfig,
    projections: Sequence[ProjectionMatrix | LearnedProjection | None],
    *,
    student_vocab_size: int,
    teacher_vocab_sizes: Sequence[int],
) -> TrainingObjective:
    """Build the objective of a run's active teachers, one projection and tokenizer size per teacher."""
    teachers, aggregation = config.active_teachers, config.aggregation
    weights = [teacher.weight for teacher in teachers]
    rule = RULES[type(aggregation)]
    if teachers and rule.averages_logits:
        size = min(student_vocab_size, *teacher_vocab_sizes)
        term = build(config.term(0), student_vocab_size=size, teacher_vocab_size=size)
        average = partial(AveragedLogits, weights=weights)
        part = TeacherLoss(None, 1.0, term, 0, average, Overlap(None, size, size))
        return TrainingObjective(config.loss, (part,), count_together=False, vocab_size=student_vocab_size)
    factors = rule.factors(aggregation, weights, teacher_vocab_sizes)
    parts = []
    entries = zip(teachers, factors, projections, teacher_vocab_sizes, strict=True)
    for i, (teacher, factor, projection, size) in enumerate(entries):
        is_same = teacher.type == "same_tokenizer"
        # Same tokenizer: use the shared columns; one side may have an extra special token.
        sizes = (min(student_vocab_size, size),) * 2 if is_same else (student_vocab_size, size)
        term = build(
            config.term(i),
            projection,
            across_tokenizers=not is_same,
            student_vocab_size=sizes[0],
            teacher_vocab_size=sizes[1],
        )
        matrix = projection.start if isinstance(projection, LearnedProjection) else projection
        overlap = Overlap(None, *sizes) if is_same else Overlap.across(matrix, *sizes)
        pieces = getattr(config.term(i), "pieces", "spelling")
        images = None if matrix is None else teacher_images(config.term(i).type, matrix, pieces)
        parts.append(TeacherLoss(teacher.name, factor, term, i, itemgetter(i), overlap, images))
    return TrainingObjective(config.loss, tuple(parts), rule.counts_together, student_vocab_size)


def coverage_metrics(objective: TrainingObjective, batch: Batch, names: Sequence[str]) -> dict[str, Metric]:
    """Return `kd_coverage/<teacher>`, the share of the student's scored tokens that are in a unit of its KD, and with
    another tokenizer `kd_positions/<teacher>`, the compared positions over the scored tokens, and the same for each
    kind of position that occurs, `kd_positions/<teacher>/<kind>`.

    names: the names of all teachers. With `select_teacher` and `routed` only a teacher's own texts count, and a teacher
    without texts has no metric.
    """
    metrics: dict[str, Metric] = {}
    for part in objective.parts:
        rows, is_scored = batch.teachers[part.teacher], batch.student.loss_mask
        covered = part.loss.num_covered(*part.rows(batch))
        if objective.count_together:
            is_scored = is_scored & (rows.tokens.lengths > 0).unsqueeze(1)
        if total := int(is_scored.sum()):
            part_names = names if part.name is None else [part.name]
            metrics |= {f"kd_coverage/{name}": Mean(int(covered.sum()), total) for name in part_names}
            if rows.chunks is not None:
                is_compared = part.loss.positions(*part.rows(batch))
                kinds = position_kinds(rows.chunks, batch.student, rows.tokens)
                metrics[f"kd_positions/{part.name}"] = Mean(int(is_compared.sum()), total)
                metrics |= _by_kind(f"kd_positions/{part.name}", kinds, is_compared, is_scored)
    return metrics


def _by_kind(name: str, kinds: Tensor, is_compared: Tensor, is_scored: Tensor) -> dict[str, Metric]:
    """Return the share of the scored tokens that are compared for each kind of position: masks and kinds [B, S]."""
    masks = (mask & (kinds >= 0) for mask in (is_compared, is_scored))
    compared, scored = (kinds[mask].bincount(minlength=len(POSITION_KINDS)) for mask in masks)
    counts = zip(POSITION_KINDS, compared.tolist(), scored.tolist(), strict=True)
    return {f"{name}/{kind}": Mean(number, of) for kind, number, of in counts if of}


def share_metrics(objective: TrainingObjective, batch: Batch) -> dict[str, Metric]:
    """Return per teacher the mean sequence weight (`weight/`) or the share of sequences (`share/`), if it varies by
    batch; with another tokenizer also `changed_history/`, the share of aligned chunks after contents that the student
    reads differently.
    """
    metrics: dict[str, Metric] = {}
    for part in objective.parts:
        rows = batch.teachers[part.teacher]
        if objective.count_together:
            metrics[f"share/{part.name}"] = Mean(int((rows.tokens.lengths > 0).sum()), len(batch))
        elif rows.weights is not None:
            metrics[f"weight/{part.name}"] = Mean(part.weight * float(rows.weights.sum()), len(batch))
        if rows.chunks is not None and rows.chunks.histories is not None:
            usable, changed = rows.chunks.histories.sum(0).tolist()
            metrics[f"changed_history/{part.name}"] = Mean(changed, usable)
    return metrics


def leakage_metrics(batch: Batch, names: Sequence[str]) -> dict[str, Metric]:
    """Return `leakage/<teacher>` of teachers with a context: the share of response bytes that also occur in it.

    names: the names of all teachers (methods.md §13).
    """
    metrics: dict[str, Metric] = {}
    for name, rows in zip(names, batch.teachers, strict=True):
        if rows.leakage is not None:
            leaked, num_bytes = rows.leakage.sum(0).tolist()
            if num_bytes:
                metrics[f"leakage/{name}"] = Mean(leaked, num_bytes)
    return metrics
