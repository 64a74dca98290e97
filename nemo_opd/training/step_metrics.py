"""Logged values of a step: the objective (methods.md §7.3), the scale of KD, times, skipped steps and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from nemo_opd.aggregation import PART, SHARE, kd_of
from nemo_opd.config.loss import (
    ALMTerm,
    BytePrefixTerm,
    ChunkTerm,
    FunctionTerm,
    LossTerm,
    PKLTerm,
    SameVocabTerm,
    SharedPrefixTerm,
    StrictTerm,
    TCADTerm,
)
from nemo_opd.config.objective import GRPOLoss, Objective
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import NotFiniteError
from nemo_opd.logging.metrics import OTHER, step_parts, values
from nemo_opd.models.load import compute_dtype
from nemo_opd.types import Mean, Metric, Metrics
from nemo_opd.workers.step import IS_TAKEN, PHASE, objective_terms

if TYPE_CHECKING:
    from nemo_opd.training.models import ScoredBatch

_SHARED_PHASES = ("forward", "backward")
"""Phases that teachers have too, so their metric names get the prefix `student_`."""
_LOGIT = 16.0
"""Assumed magnitude of a logit; rounding it makes equal models differ."""
_ROUNDING = 1e-6
"""Error of computing a divergence in fp32, in nats."""
_FORWARD_KLS = (SameVocabTerm, TCADTerm, PKLTerm, StrictTerm, BytePrefixTerm, SharedPrefixTerm)
"""Terms whose forward KL is a KL(teacher ‖ student) on cells: at most log(vocab_size) for a student with equal
probabilities for all tokens.
"""


def objective_values(config: RunConfig, metrics: Metrics, kd_scale: float, phase: str) -> dict[str, float]:
    """Return reduced metrics under their logged names, with the totals `<phase>/kd` and `<phase>/loss`.

    CE and KD without units are left out (CE if the student sampled all texts, KD of a teacher to which no text is
    routed), and so are the workers' phases and IS_TAKEN.
    """
    logged = {
        name: metric
        for name, metric in metrics.items()
        if not name.startswith((PART, SHARE, PHASE, IS_TAKEN))
        and not ((name == "ce" or name.startswith("kd/")) and isinstance(metric, Mean) and not metric.count)
    }
    named = {f"{phase}/{name}": value for name, value in values(logged).items()}
    terms = [(config.loss.ce_weight, named.get(f"{phase}/ce", 0.0))]
    if config.active_teachers:
        named[f"{phase}/kd"] = kd = kd_of(metrics)
        terms.append((config.loss.kd_weight * kd_scale, kd))
    if isinstance(config.loss, GRPOLoss):
        terms.append((config.loss.policy_weight, named.get(f"{phase}/policy/loss", 0.0)))
    # A term with weight 0 may be infinite.
    named[f"{phase}/loss"] = sum(weight * value for weight, value in terms if weight)
    return named


class KDScale:
    """Factor of KD: 1, or with `loss.scaling=dynamic` EMA(CE)/EMA(KD), at most `loss.scaling_cap` (methods.md §7.3).

    Skipped steps and steps without both terms do not count. The averages start at 0, a bias that cancels in the ratio.
    """

    def __init__(self, objective: Objective) -> None:
        self._is_dynamic = objective.scaling == "dynamic"
        self._decay, self._cap = objective.scaling_decay, objective.scaling_cap
        self._ce = self._kd = 0.0

    @property
    def value(self) -> float:
        if not self._is_dynamic or (self._ce, self._kd) == (0, 0):
            return 1.0
        # The absolute value: KD of a truncated divergence without normalisation may be negative.
        return min(self._cap, self._ce / abs(self._kd)) if self._kd else self._cap

    def update(self, metrics: Metrics) -> None:
        """Update the averages with the reduced metrics of a step that was not skipped, if both terms have units."""
        ce, parts = metrics["ce"], [metric for name, metric in metrics.items() if name.startswith(PART)]
        kd = kd_of(metrics)
        # CE with weight 0 may be infinite although the step is not skipped.
        if _has_units([ce]) and _has_units(parts) and math.isfinite(ce.value()) and math.isfinite(kd):
            self._ce = self._decay * self._ce + (1 - self._decay) * ce.value()
            self._kd = self._decay * self._kd + (1 - self._decay) * kd

    def state_dict(self) -> dict[str, float]:
        return {"ce": self._ce, "kd": self._kd}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._ce, self._kd = state.get("ce", 0.0), state.get("kd", 0.0)


def _has_units(metrics: Iterable[Metric]) -> bool:
    return any(metric.count > 0 for metric in metrics if isinstance(metric, Mean))


class SkippedSteps:
    """Counts of skipped steps, in total and in a row, with the reason for the last one."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.total = 0
        self.in_a_row = 0
        self._is_students = False
        """Whether no term of the last skipped step was finite, so the student's logits are the cause."""
        self._last = ""

    def observe(self, step: int, metrics: Metrics) -> str | None:
        """Count a step from its reduced metrics; return a warning if it was skipped, else None."""
        if metrics[IS_TAKEN].value():
            self.in_a_row = 0
            return None
        self.total += 1
        self.in_a_row += 1
        self._is_students = not any(math.isfinite(value) for value in _term_values(self._config, metrics).values())
        self._last = f"step {step}: {cause(self._config, metrics)}"
        return f"{self._last}; the step is skipped, and weights, optimizer and schedule stay as they are"

    def require_progress(self) -> None:
        """Raise NotFiniteError after `train.max_skipped_steps` skipped steps in a row."""
        limit = self._config.train.max_skipped_steps
        if self.in_a_row >= limit:
            raise NotFiniteError(
                f"{self._last}; the last {self.in_a_row} steps were skipped (train.max_skipped_steps={limit}), which "
                "leaves the student's weights as they were before: if the student has diverged, lower "
                f"student.optimizer.lr or set train.gradient_clip{self._hint()}; leave out a teacher whose logits "
                "overflow"
            )

    def require_sound_end(self, validated: float | None) -> None:
        """Raise NotFiniteError if the run would end with a diverged student.

        validated: bits per byte of the student. Without validation (None) the last step decides.
        """
        if validated is None:
            has_diverged, evidence = self.in_a_row > 0 and self._is_students, "the last step was skipped"
        else:
            has_diverged = not math.isfinite(validated)
            evidence = f"the last validation gives {validated} bits per byte"
        if has_diverged:
            raise NotFiniteError(
                f"{evidence}: the student has diverged and is not exported, and the last {self.in_a_row} steps were "
                "skipped; lower student.optimizer.lr or set train.gradient_clip and start again with another "
                "run.output_dir, or export a checkpoint with nemo-opd checkpoint to-hf"
            )

    def _hint(self) -> str:
        in_float16 = [i for i, teacher in enumerate(self._config.active_teachers) if teacher.dtype == "float16"]
        settings = " ".join(f"teachers.{i}.dtype=bfloat16" for i in in_float16)
        return f"; write {settings} if a teacher overflows in float16" if in_float16 else ""

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total, "in_a_row": self.in_a_row, "is_students": int(self._is_students)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.total, self.in_a_row = state.get("total", 0), state.get("in_a_row", 0)
        self._is_students = bool(state.get("is_students", 0))


def _term_values(config: RunConfig, metrics: Metrics) -> dict[str, float]:
    """Return the objective's unweighted terms, keyed by name."""
    return {term.name: term.metric.value() for term in objective_terms(config, metrics)}


def cause(config: RunConfig, metrics: Metrics) -> str:
    """Describe which terms of the objective were not finite, or that only the gradient was not."""
    values = _term_values(config, metrics)
    not_finite = [f"{name} ({value})" for name, value in values.items() if not math.isfinite(value)]
    if not_finite:
        logits = ", so the student's own logits are not" if "CE" in values and not math.isfinite(values["CE"]) else ""
        return f"{', '.join(not_finite)} {'is' if len(not_finite) == 1 else 'are'} not finite{logits}"
    return f"the gradient's norm is {metrics['grad_norm'].value()}, although all terms of the loss are finite"


def step_times(spans: Mapping[str, float], student: Metrics, teachers: Mapping[str, float]) -> dict[str, float]:
    """Return `perf/step_s` and its parts, in seconds.

    spans: the driver's timer spans, with `step_s`. student: metrics with the phases of its workers, maxima over ranks.
    teachers: seconds keyed by name. If teachers read ahead, perf/teacher_s is the time of the slowest, and only
    perf/teacher_wait_s is part of the step. perf/other_s is the remainder: calls between processes, merging metrics,
    offloading.
    """
    # If teachers read ahead, the last steps of a run read no batch.
    times = {"perf/data_wait_s": 0.0} | {f"perf/{span}": seconds for span, seconds in spans.items()}
    if teachers:
        times.setdefault("perf/teacher_s", max(teachers.values()))
    else:
        times.pop("perf/teacher_s", None)
    times |= {f"perf/teacher_s/{name}": seconds for name, seconds in teachers.items()}
    for name, metric in student.items():
        if name.startswith(PHASE):
            phase = name.removeprefix(PHASE)
            times[f"perf/student_{phase}_s" if phase in _SHARED_PHASES else f"perf/{phase}_s"] = metric.value()
    return {**times, "perf/other_s": step_parts(times)[OTHER]}


def useful_positions(scored: ScoredBatch, by_student: float, names: Sequence[str]) -> dict[str, float]:
    """Return the shares of positions that are not padding: `perf/useful_positions` and the same for each teacher.

    by_student: positions that the student has read. names: names of the teachers.
    """
    shares = {"perf/useful_positions": int(scored.batch.student.lengths.sum()) / by_student}
    for name, rows, positions in zip(names, scored.batch.teachers, scored.positions, strict=True):
        shares[f"perf/useful_positions/{name}"] = int(rows.tokens.lengths.sum()) / positions
    return shares


def first_kd_warnings(config: RunConfig, vocab_size: int, device: str, record: Mapping[str, float]) -> Iterator[str]:
    """Yield a warning for each teacher whose KD at the first step is about 0 or above log(vocab_size) nats per unit.

    record: metrics of the step, computed before its update. No warning about agreement for a teacher with the student's
    weights or model.
    """
    for i, teacher in enumerate(config.active_teachers):
        name, term = f"train/kd/{teacher.name}", config.term(i)
        kd = record.get(name, math.nan) / getattr(term, "temperature", 1.0) ** 2
        is_other_model = not teacher.is_student and teacher.model != config.student.model
        if is_other_model and _is_about_0(kd, term, _noise(config, i, device)):
            yield (
                f"{name} is {kd:.1g}: {teacher.name} and the student agree up to rounding, although "
                f"teachers.{i}.model={teacher.model} and student.model={config.student.model} differ. Either one is a "
                "copy of the other, so the student cannot learn from it, or the loss compares very few tokens: see "
                f"train/kd_coverage/{teacher.name} and the settings that restrict the comparison"
            )
        if math.log(vocab_size) < kd < math.inf and _is_forward_kl(term):
            yield (
                f"{name} is {kd:.3g} nats, but a student with equal probabilities for all {vocab_size} tokens has at "
                f"most {math.log(vocab_size):.3g}. Likely causes: {teacher.name} reads texts in another format than in "
                f"its training (teachers.{i}.chat_template, special tokens at the beginning), its tokenizer does not "
                f"match its model (teachers.{i}.tokenizer), or its weights are damaged or overflow in their dtype"
            )


def _noise(config: RunConfig, i: int, device: str) -> float:
    """Return the KL in nats between two roundings of the same logits, in the coarser dtype of student and teacher.

    It is half the variance of a logit's error, ulp² / 12. A cached or served teacher counts as bfloat16.
    """
    teacher = config.active_teachers[i]
    names = (config.student.dtype, teacher.dtype if teacher.is_computed else "bfloat16")
    eps = max(torch.finfo(compute_dtype(name, device)).eps for name in names)
    return max(_ROUNDING, (_LOGIT * eps) ** 2 / 24)


def _is_about_0(kd: float, term: LossTerm, noise: float) -> bool:
    """Return whether the models agree. Only a divergence in nats is compared with the noise; others must be 0."""
    if isinstance(term, ALMTerm | FunctionTerm):  # not 0 for equal models
        return False
    return abs(kd) <= (noise if isinstance(term, _FORWARD_KLS) else 0)


def _is_forward_kl(term: LossTerm) -> bool:
    if not isinstance(term, _FORWARD_KLS) or term.divergence != "forward_kl":
        return False
    has_coin = isinstance(term, ChunkTerm) and term.continuation_weight > 0  # spans several tokens, so unbounded
    weighs_coverage = isinstance(term, TCADTerm | PKLTerm) and (term.coverage_coef or 0) > 1
    return not has_coin and not weighs_coverage
