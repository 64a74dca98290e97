"""The objective of a global step, from its reduced metrics (methods.md §7.3)."""

import math
from collections.abc import Iterable, Mapping

from nemo_opd.aggregation import PART, SHARE, kd_of
from nemo_opd.config.loss import GRPOLoss, Objective
from nemo_opd.config.run import RunConfig
from nemo_opd.logging.metrics import values
from nemo_opd.types import Mean, Metric, Metrics
from nemo_opd.workers.phases import PREFIX as PHASE
from nemo_opd.workers.terms import IS_TAKEN


def objective_values(config: RunConfig, metrics: Metrics, kd_scale: float, phase: str) -> dict[str, float]:
    """Reduced metrics under their logged names, with the totals over teachers: `<phase>/kd` and `<phase>/loss`.

    Left out is what has no unit: CE where the student has sampled all texts, KD of a teacher to which none of them is
    routed; so are the phases of workers, and whether the step was taken.
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
    # A term without a weight may be infinite.
    named[f"{phase}/loss"] = sum(weight * value for weight, value in terms if weight)
    return named


class KDScale:
    """Factor of KD: 1, or with `loss.scaling=dynamic` EMA(CE)/EMA(KD), at most `loss.scaling_cap` (methods.md §7.3).

    Only steps count that were taken and had both terms. The averages start at 0, which cancels out in their ratio: all
    steps weigh as their age says, the first too.
    """

    def __init__(self, objective: Objective) -> None:
        self._is_dynamic = objective.scaling == "dynamic"
        self._decay, self._cap = objective.scaling_decay, objective.scaling_cap
        self._ce = self._kd = 0.0

    @property
    def value(self) -> float:
        if not self._is_dynamic or (self._ce, self._kd) == (0, 0):
            return 1.0
        # By magnitude: KD is below 0 at times where a truncated divergence is not normalised, for parity.
        return min(self._cap, self._ce / abs(self._kd)) if self._kd else self._cap

    def update(self, metrics: Metrics) -> None:
        """Take in the reduced metrics of a step that was taken; one without units of CE or KD says nothing."""
        ce, parts = metrics["ce"], [metric for name, metric in metrics.items() if name.startswith(PART)]
        kd = kd_of(metrics)
        # A CE without a weight may be infinite, and the step is taken all the same.
        if has_units([ce]) and has_units(parts) and math.isfinite(ce.value()) and math.isfinite(kd):
            self._ce = self._decay * self._ce + (1 - self._decay) * ce.value()
            self._kd = self._decay * self._kd + (1 - self._decay) * kd

    def state_dict(self) -> dict[str, float]:
        return {"ce": self._ce, "kd": self._kd}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._ce, self._kd = state.get("ce", 0.0), state.get("kd", 0.0)


def has_units(metrics: Iterable[Metric]) -> bool:
    return any(metric.count > 0 for metric in metrics if isinstance(metric, Mean))
