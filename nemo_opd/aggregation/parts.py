"""KD as a sum of parts: one for each teacher, or one for the averaged logits of all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from nemo_opd.aggregation.overlap import Overlap
from nemo_opd.aggregation.rules import RULES
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.transfer import planned
from nemo_opd.logits.combined import AveragedLogits
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.rows import LogitRows, logit_rows
from nemo_opd.losses.build import TermLoss, build
from nemo_opd.losses.learned_projection import LearnedProjection
from nemo_opd.losses.reduction import count_label_tokens, label_mask, sampled_mask
from nemo_opd.losses.rollout_statistics import plan_rollout_statistics
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.types import Batch, Mean, Metric, Normalizers, TeacherRows, TokenRows

PART = "kd_part/"
"""Prefix of the metrics whose values, each times that under SHARE if there is one, add up to the KD trained on."""
SHARE = "kd_share/"
"""Prefix of the metrics that say which share of the texts has units of the part's kind; absent where all have."""


@dataclass(frozen=True, slots=True)
class Divisor:
    """Divisor of a part's sum over some rows: units / share (methods.md §6.5)."""

    units: float
    """Units of the part, or of all parts whose units count alike."""
    share: Mean | None = None
    """Texts with such units, of all with any; None: all units count alike."""

    @property
    def value(self) -> float:
        """1 where there is no unit, as 0 is divided by it."""
        share = 1.0 if self.share is None else self.share.value()
        return self.units / share if self.units else 1.0


@dataclass(frozen=True, slots=True)
class Part:
    """One summand of KD: weight · loss."""

    name: str | None
    """Name of the teacher; None where logits are averaged."""
    weight: float
    term: TermLoss
    teacher: int
    """Index of the teacher whose rows of a batch it reads; the first where logits are averaged."""
    logits_of: Callable[[Sequence[LogitRows]], LogitRows]
    """Function from the logits of all teachers to those that it reads."""
    overlap: Overlap | None = None
    """None without a map from its tokens to the student's."""

    def num_units(self, batch: Batch) -> float:
        """Return the number of units in the batch, those of a sequence times its rollout weight."""
        rows = batch.teachers[self.teacher]
        return self.term.num_units(self.student_side(batch), rows, batch.sampled)

    def num_texts(self, batch: Batch) -> int:
        """Return the number of texts that have a unit."""
        rows = batch.teachers[self.teacher]
        return self.term.num_texts(self.student_side(batch), rows, batch.sampled)

    def num_positions(self, batch: Batch) -> int:
        """Count the units in the batch."""
        return self.term.num_places(self.student_side(batch), batch.teachers[self.teacher], batch.sampled)

    def num_covered(self, batch: Batch) -> Tensor:
        """Count the student's scored tokens that are in a unit: int64 [B]."""
        return self.term.num_covered(self.student_side(batch), batch.teachers[self.teacher], batch.sampled)

    def student_side(self, batch: Batch) -> TokenRows:
        """Return the student's tokens that are compared: with all teachers at once where logits are averaged."""
        own = batch.teachers[self.teacher].student_side(batch.student)
        if self.name is not None or all(rows.moved is None for rows in batch.teachers):
            return own
        masks = [rows.student_side(batch.student).loss_mask for rows in batch.teachers]
        (mask,) = planned(lambda *masks: [torch.stack(masks).all(0)], *masks)
        return replace(own, loss_mask=mask)

    def plan(
        self,
        student_logits: Tensor | LogitRows,
        teacher_logits: Sequence[LogitRows],
        batch: Batch,
        own: Divisor,
        normalizer: float,
    ) -> PlannedLoss:
        """Plan weight · loss of these rows / normalizer.

        own: of these rows. Its metrics are the loss's own under the part's name, and under PART and SHARE its part in
        KD.
        """
        rows = batch.teachers[self.teacher]
        loss = self.term.plan(
            student_logits,
            self.logits_of(teacher_logits),
            self.student_side(batch),
            rows,
            normalizer,
            sampled=batch.sampled,
            sequence_weights=_sequence_weights(rows),
        )

        def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
            found = {self._named(name): metric for name, metric in loss.metrics_of(weighted, unweighted).items()}
            share = {} if own.share is None else {f"{SHARE}{self.teacher}": own.share}
            return found | share | {f"{PART}{self.teacher}": Mean(self.weight * weighted, own.units)}

        return replace(loss.times(self.weight), metrics_of=metrics_of)

    def plan_overlap(
        self, student_logits: Tensor | LogitRows, teacher_logits: Sequence[LogitRows], batch: Batch
    ) -> list[PlannedLoss]:
        """Plan the overlap of both sides' likeliest tokens, in the student's samples if there are any.

        Empty where it is not defined: without exact pairs of tokens, or where the likeliest are not all known.
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


@dataclass(frozen=True, slots=True)
class Parts:
    """All of KD, as the aggregation says (methods.md §6)."""

    parts: tuple[Part, ...]
    count_together: bool
    """True: each text has one teacher, and KD is (6.2) of methods.md §6.5. False: KD is the sum of the parts, each of
    which is a mean over its own units.
    """

    def counts(self, batch: Batch) -> list[float]:
        """Count what normalizers are made of: label tokens, sampled tokens, and by part its units and its texts.

        Counts of the parts of a global batch add up to its own.
        """
        masks = label_mask(batch), sampled_mask(batch.student.loss_mask, batch.sampled)
        tokens = [int(count_label_tokens(mask).sum()) for mask in masks]
        return [*tokens, *self._units(batch), *self._texts(batch)]

    def divisors(self, batch: Batch) -> tuple[Divisor, ...]:
        """Return the divisors of these rows, by part."""
        return self._divisors(self._units(batch), self._texts(batch))

    def _units(self, batch: Batch) -> list[float]:
        return [part.num_units(batch) for part in self.parts]

    def _texts(self, batch: Batch) -> list[float]:
        """Count the texts of each part; zeros where they do not matter."""
        return [part.num_texts(batch) if self._has_several_kinds else 0 for part in self.parts]

    @property
    def _has_several_kinds(self) -> bool:
        return self.count_together and len({part.term.unit for part in self.parts}) > 1

    def _divisors(self, units: Sequence[float], texts: Sequence[float]) -> tuple[Divisor, ...]:
        if not self.count_together:
            return tuple(map(Divisor, units))
        if not self._has_several_kinds:
            return (Divisor(sum(units)),) * len(units)
        kinds = [part.term.unit for part in self.parts]
        return tuple(
            Divisor(_sum_where(units, kinds, kind), Mean(_sum_where(texts, kinds, kind), sum(texts))) for kind in kinds
        )

    def normalizers(self, batch: Batch) -> Normalizers:
        """Return the normalizers of a global batch, by part; 1 for a part without units."""
        return self.normalizers_of(self.counts(batch))

    def normalizers_of(self, counts: Sequence[float]) -> Normalizers:
        """Return the normalizers of a global batch with these `counts`."""
        labels, sampled, *of_parts = counts
        units, texts = of_parts[: len(self.parts)], of_parts[len(self.parts) :]
        divisors = self._divisors(units, texts)
        return Normalizers(int(labels) or 1, tuple(each.value for each in divisors), int(sampled) or 1)

    def plan(
        self,
        student_logits: Tensor | LogitRows,
        teacher_logits: Sequence[LogitRows],
        batch: Batch,
        divisors: Sequence[Divisor],
        normalizers: Sequence[float],
    ) -> list[PlannedLoss]:
        """Plan the parts, whose sum is KD.

        Student's [B, S, V] and teachers' logits [B, T, W] and the batch are of the same rows; divisors: of them;
        normalizers: those of the global batch. The metrics under PART and SHARE make KD also when batches are pooled.
        """
        return [
            part.plan(student_logits, teacher_logits, batch, own, normalizer)
            for part, own, normalizer in zip(self.parts, divisors, normalizers, strict=True)
        ]

    def plan_statistics(
        self, student_logits: Tensor | LogitRows, teacher_logits: Sequence[LogitRows], batch: Batch, *, vocab_size: int
    ) -> list[PlannedLoss]:
        """Plan statistics of the samples in these rows; none where there are no samples.

        See `plan_rollout_statistics`, and `overlap/<teacher>` (methods.md §10.7).
        """
        if batch.sampled is None:
            return []
        own = plan_rollout_statistics(student_logits, batch.student, batch.sampled, vocab_size=vocab_size)
        return [own, *self.plan_overlaps(student_logits, teacher_logits, batch)]

    def plan_overlaps(
        self, student_logits: Tensor | LogitRows, teacher_logits: Sequence[LogitRows], batch: Batch
    ) -> list[PlannedLoss]:
        """Plan `overlap/<teacher>` in the samples of these rows, or in all texts where there are none."""
        overlaps = (part.plan_overlap(student_logits, teacher_logits, batch) for part in self.parts)
        return [plan for plans in overlaps for plan in plans]


def _sequence_weights(rows: TeacherRows) -> Tensor | None:
    """Return what the units of each sequence are multiplied by, float32 [B]; None for 1."""
    if rows.weights is None or rows.rollout_weights is None:
        return rows.rollout_weights if rows.weights is None else rows.weights
    return planned(lambda own, among_samples: [own * among_samples], rows.weights, rows.rollout_weights)[0]


def _sum_where(values: Sequence[float], kinds: Sequence[str], wanted: str) -> float:
    return sum(value for value, kind in zip(values, kinds, strict=True) if kind == wanted)


def kd_of(metrics: Mapping[str, Metric]) -> float:
    """Return the KD that is trained on, from the metrics under PART and SHARE."""
    total = 0.0
    for name, metric in metrics.items():
        if name.startswith(PART):
            share = metrics.get(SHARE + name.removeprefix(PART))
            total += metric.value() * (1.0 if share is None else share.value())
    return total


def build_parts(
    config: RunConfig,
    projections: Sequence[ProjectionMatrix | LearnedProjection | None],
    *,
    student_vocab_size: int,
    teacher_vocab_sizes: Sequence[int],
) -> Parts:
    """Return the KD of a run with these active teachers; sizes are the tokenizers'."""
    teachers, aggregation = config.active_teachers, config.aggregation
    weights = [teacher.weight for teacher in teachers]
    rule = RULES[type(aggregation)]
    if teachers and rule.averages_logits:
        size = min(student_vocab_size, *teacher_vocab_sizes)
        term = build(config.term(0), student_vocab_size=size, teacher_vocab_size=size)
        averaged, overlap = partial(AveragedLogits, weights=weights), Overlap(None, size, size)
        return Parts((Part(None, 1.0, term, 0, averaged, overlap),), count_together=False)
    factors = rule.factors(aggregation, weights, teacher_vocab_sizes)
    parts = []
    entries = zip(teachers, factors, projections, teacher_vocab_sizes, strict=True)
    for i, (teacher, factor, projection, size) in enumerate(entries):
        is_same = teacher.type == "same_tokenizer"
        # Of one tokenizer: the columns that both have, as one side may have a special token more.
        sizes = (min(student_vocab_size, size),) * 2 if is_same else (student_vocab_size, size)
        term = build(
            config.term(i),
            projection,
            across_tokenizers=not is_same,
            student_vocab_size=sizes[0],
            teacher_vocab_size=sizes[1],
        )
        matrix = projection.start if isinstance(projection, LearnedProjection) else projection
        compared = Overlap(None, *sizes) if is_same else Overlap.across(matrix, *sizes, config.term(i).type)
        parts.append(Part(teacher.name, factor, term, i, itemgetter(i), compared))
    return Parts(tuple(parts), count_together=rule.counts_together)
