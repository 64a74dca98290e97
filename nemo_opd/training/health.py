"""Alarms about the student's samples: collapse, growing lengths, engine mismatch (methods.md §10.7)."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from nemo_opd.config.health import Health

FIRST_STEPS = 5
"""Number of first steps whose mean is the baseline."""


@dataclass(frozen=True, slots=True)
class _Sign:
    """A sign of a failing run."""

    metric: str
    is_bad: Callable[[float, float, Health], bool]
    """Function of the metric's current value, its mean over the first steps, and the limits."""
    message: str
    """Message template with the fields `now` and `first`."""


SIGNS = (
    _Sign(
        "rollout/response_length",
        lambda now, first, limits: now > limits.max_length_growth * first,
        "responses keep growing: {now:.0f} tokens on average, {first:.0f} at first; lower the learning rate or the "
        "temperature, or raise health.max_length_growth",
    ),
    _Sign(
        "rollout/truncation_rate",
        lambda now, first, limits: now > limits.max_truncation_rate >= first,
        "responses no longer end: {now:.0%} are cut, {first:.0%} at first; raise rollout.max_new_tokens, or lower the "
        "learning rate",
    ),
    _Sign(
        "train/entropy",
        lambda now, first, limits: now < limits.min_entropy <= first,
        "the student's entropy has collapsed: {now:.3g} nats per token, {first:.3g} at first; raise the temperature, "
        "or lower the learning rate",
    ),
    _Sign(
        "rollout/repetition",
        lambda now, first, limits: now > limits.max_repetition >= first,
        "responses repeat themselves: {now:.0%} of their 4-grams are not new, {first:.0%} at first; lower the learning "
        "rate, or mix in sequences of the dataset with rollout.on_policy_share",
    ),
    _Sign(
        "train/mismatch",
        lambda now, first, limits: now > limits.max_mismatch,
        "engine and trainer disagree on the sampled tokens by {now:.2g} nats on average; check that the engine runs "
        "the student's weights in the student's precision, lower rollout.staleness, or raise health.max_mismatch for "
        "an engine in fp8 or int4",
    ),
)


class HealthMonitor:
    """Monitor that compares steps with the first ones. `patience` bad steps in a row raise an alarm, once per sign."""

    def __init__(self, limits: Health) -> None:
        self._limits = limits
        self._first: dict[str, list[float]] = {sign.metric: [] for sign in SIGNS}
        self._recent: dict[str, deque[bool]] = {sign.metric: deque(maxlen=limits.patience) for sign in SIGNS}
        self._reported: set[str] = set()

    def replay(self, records: Iterable[Mapping[str, float]]) -> None:
        """Observe the earlier steps of a resumed run, whose alarms were already reported."""
        for record in records:
            self.observe(record)

    def observe(self, record: Mapping[str, float]) -> list[str]:
        """Return the new alarms of a step. Missing and non-finite metrics are skipped."""
        return [
            sign.message.format(now=record[sign.metric], first=fmean(self._first[sign.metric]))
            for sign in SIGNS
            if math.isfinite(record.get(sign.metric, math.nan)) and self._is_alarm(sign, record[sign.metric])
        ]

    def _is_alarm(self, sign: _Sign, now: float) -> bool:
        first, recent = self._first[sign.metric], self._recent[sign.metric]
        if len(first) < FIRST_STEPS:
            first.append(now)
        recent.append(sign.is_bad(now, fmean(first), self._limits))
        if sign.metric in self._reported or len(recent) < self._limits.patience or not all(recent):
            return False
        self._reported.add(sign.metric)
        return True
