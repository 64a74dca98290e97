"""Best steps by a metric, and early stopping."""

import math
from collections.abc import Mapping
from copy import copy

from nemo_opd.checkpoint.manager import BestMetric
from nemo_opd.config.train import ChosenMetric, EarlyStopping, KeepBest

_BEST, _WAITED = "best", "waited"


def _criterion(settings: ChosenMetric) -> str:
    """Return an identifier of the criterion; saved state of another criterion is discarded."""
    return f"{settings.mode} {settings.metric}"


class BestSteps:
    """Tracker of the steps with the `n` best values; ties go to the earlier step."""

    def __init__(self, settings: KeepBest | None) -> None:
        self._settings = settings
        self._values: dict[int, float] = {}

    def observe(self, step: int, record: Mapping[str, float]) -> bool:
        """Return whether a step is among the best and should be saved. Step 0 never is, since it has no checkpoint."""
        settings = self._settings
        value = math.nan if settings is None else record.get(settings.metric, math.nan)
        if settings is None or not step or not math.isfinite(value):
            return False
        sign = -1 if settings.mode == "max" else 1
        ranked = sorted((self._values | {step: value}).items(), key=lambda item: (sign * item[1], item[0]))
        self._values = dict(ranked[: settings.n])
        return step in self._values

    @property
    def ranked(self) -> list[tuple[int, float]]:
        """Steps with their values, best first."""
        return list(self._values.items())

    def state(self) -> BestMetric:
        """Return the state, for resuming."""
        if self._settings is None:
            return BestMetric()
        return BestMetric(_criterion(self._settings), {str(step): value for step, value in self._values.items()})

    def load_state(self, state: BestMetric) -> None:
        if self._settings is not None and state.by == _criterion(self._settings):
            ranked = [(int(step), value) for step, value in state.values.items()]
            self._values = dict(ranked[: self._settings.n])


class Patience:
    """Counter of evaluations since the metric last improved."""

    def __init__(self, settings: EarlyStopping | None) -> None:
        self._settings = settings
        self._best: float | None = None
        self._waited = 0

    def observe(self, record: Mapping[str, float]) -> None:
        settings = self._settings
        if settings is None or settings.metric not in record:
            return
        value = record[settings.metric]
        step = settings.min_delta if settings.mode == "max" else -settings.min_delta
        if math.isfinite(value) and (self._best is None or settings.is_better(value, self._best + step)):
            self._best, self._waited = value, 0
        else:
            self._waited += 1

    def ends_with(self, record: Mapping[str, float]) -> bool:
        """Return whether observing this record would end the run."""
        later = copy(self)
        later.observe(record)
        return later.is_over

    @property
    def is_over(self) -> bool:
        return self._settings is not None and self._waited >= self._settings.patience

    @property
    def reason(self) -> str:
        """Log line that tells why the run ends."""
        assert self._settings is not None
        return (
            f"{self._settings.metric} has not improved on {self._best} in {self._waited} evaluations "
            f"(train.early_stopping.patience={self._settings.patience}); ending"
        )

    def state(self) -> BestMetric:
        """Return the state, for resuming."""
        if self._settings is None or self._best is None:
            return BestMetric()
        return BestMetric(_criterion(self._settings), {_BEST: self._best, _WAITED: float(self._waited)})

    def load_state(self, state: BestMetric) -> None:
        if self._settings is not None and state.by == _criterion(self._settings):
            self._best, self._waited = state.values[_BEST], int(state.values[_WAITED])
