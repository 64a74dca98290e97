"""The objective of a global step, from its reduced metrics (METHODS §7)."""

from nemo_opd.aggregation import PART, SHARE, kd_of
from nemo_opd.config.loss import GRPOLoss, Objective
from nemo_opd.config.run import RunConfig
from nemo_opd.logging.metrics import values
from nemo_opd.types import Mean, Metrics
from nemo_opd.workers.phases import PREFIX as PHASE


def objective_values(config: RunConfig, metrics: Metrics, kd_scale: float, phase: str) -> dict[str, float]:
    """Reduced metrics under their logged names, with the totals over teachers: `<phase>/kd` and `<phase>/loss`.

    A teacher whose KD has no unit, as none of these texts is its own, is left out; so are the phases of workers.
    """
    logged = {
        name: metric
        for name, metric in metrics.items()
        if not name.startswith((PART, SHARE, PHASE))
        and not (name.startswith("kd/") and isinstance(metric, Mean) and not metric.count)
    }
    named = {f"{phase}/{name}": value for name, value in values(logged).items()}
    loss = config.loss.ce_weight * named[f"{phase}/ce"]
    if config.active_teachers:
        kd = kd_of(metrics)
        named[f"{phase}/kd"] = kd
        loss += config.loss.kd_weight * kd_scale * kd
    if isinstance(config.loss, GRPOLoss):
        loss += config.loss.policy_weight * named.get(f"{phase}/policy/loss", 0.0)
    named[f"{phase}/loss"] = loss
    return named


class KDScale:
    """1, or with `loss.scaling=dynamic` the moving average of CE/KD over the steps so far."""

    def __init__(self, objective: Objective) -> None:
        self._is_dynamic = objective.scaling == "dynamic"
        self._decay = objective.scaling_decay
        self.ratio: float | None = None
        """The moving average; None before the first step."""

    @property
    def value(self) -> float:
        return self.ratio if self._is_dynamic and self.ratio is not None else 1.0

    def update(self, ce: float, kd: float) -> None:
        """Take in a global step's raw terms; a step without KD says nothing about the ratio."""
        if kd > 0:
            ratio = ce / kd
            self.ratio = ratio if self.ratio is None else self._decay * self.ratio + (1 - self._decay) * ratio
