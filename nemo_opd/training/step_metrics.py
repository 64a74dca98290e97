"""Logged values of a step: the objective (methods.md §7.3), the scale of KD, and times."""

import math
from collections.abc import Iterable, Mapping, Sequence

from nemo_opd.aggregation import PART, SHARE, kd_of
from nemo_opd.config.objective import GRPOLoss, Objective
from nemo_opd.config.run import RunConfig
from nemo_opd.logging.metrics import values
from nemo_opd.logging.step_time import OTHER, step_parts
from nemo_opd.training.models import ScoredBatch
from nemo_opd.types import Mean, Metric, Metrics
from nemo_opd.workers.phases import PREFIX as PHASE
from nemo_opd.workers.terms import IS_TAKEN


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


def useful_positions(scored: ScoredBatch, by_student: float, names: Sequence[str]) -> dict[str, float]:
    """Return the shares of positions that are not padding: `perf/useful_positions` and the same for each teacher.

    by_student: positions that the student has read. names: names of the teachers.
    """
    shares = {"perf/useful_positions": int(scored.batch.student.lengths.sum()) / by_student}
    for name, rows, positions in zip(names, scored.batch.teachers, scored.positions, strict=True):
        shares[f"perf/useful_positions/{name}"] = int(rows.tokens.lengths.sum()) / positions
    return shares


_STUDENT = ("forward", "backward")
"""Phases that teachers have too, so their metric names get the prefix `student_`."""


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
    times |= {f"perf/teacher_s/{name}": seconds for name, seconds in teachers.items()}
    for name, metric in student.items():
        if name.startswith(PHASE):
            times[_metric_name(name.removeprefix(PHASE))] = metric.value()
    return {**times, "perf/other_s": step_parts(times)[OTHER]}


def _metric_name(phase: str) -> str:
    return f"perf/student_{phase}_s" if phase in _STUDENT else f"perf/{phase}_s"
