"""On-policy distillation: the student learns the teachers' distributions on its own samples (methods.md §10)."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from nemo_opd.config.rollout import Health
from nemo_opd.config.run import RunConfig
from nemo_opd.logging.loggers import read
from nemo_opd.logging.metrics import values
from nemo_opd.preflight.plan import Plan
from nemo_opd.preflight.prompts import Prompts
from nemo_opd.rewards import build_reward
from nemo_opd.rollout.collect import Collector, RolloutLog, rollout_metrics
from nemo_opd.rollout.engine_interface import Sampling
from nemo_opd.rollout.environment import build_environment
from nemo_opd.training import off_policy
from nemo_opd.training.batches import RolloutSource, RolloutSteps
from nemo_opd.training.engines import open_engine
from nemo_opd.training.evaluator import Evaluator
from nemo_opd.training.finished import Finished
from nemo_opd.training.session import Session
from nemo_opd.types import Max, Mean, Metric

FIRST_STEPS = 5
"""Number of first steps whose mean is the baseline."""


def distil(config: RunConfig, callbacks: Sequence[Any] = ()) -> Finished | None:
    """Run as `off_policy.distil` does; an alarm may end the run as well."""
    return off_policy.distil(config, callbacks, _OnPolicySession)


class _OnPolicySession(Session):
    """Session with rollouts, rewards and alarms about the student's health."""

    samples = True
    source: RolloutSource

    def __init__(self, plan: Plan, callbacks: Sequence[Any] = (), continued_in: Path | None = None) -> None:
        super().__init__(plan, callbacks, continued_in)
        self._retried = 0
        self.rollout_log = RolloutLog(plan.output_dir, self.config.logging.rollouts)
        self.health = HealthMonitor(self.config.health)

    @property
    def prompts(self) -> Prompts:
        assert isinstance(self.plan.data, Prompts)
        return self.plan.data

    def open_source(self) -> RolloutSource:
        return RolloutSource(self.config, self.prompts.order(self.config), self.plan.total_steps)

    def connect(self, stack: ExitStack) -> None:
        config, prompts = self.config, self.prompts
        assert config.rollout is not None
        self.loggers.phase("starting the rollout engine")
        self.engine = stack.enter_context(open_engine(self.plan, self.models, self.step))
        self.reward = None if config.reward is None else stack.enter_context(build_reward(config.reward))
        rollout = config.rollout
        sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k)
        environment = config.environment
        collector = Collector(
            self.engine,
            prompts.student.renderer,
            sampling=sampling,
            max_new_tokens=rollout.max_new_tokens,
            max_length=prompts.student.max_length,
            environment=None if environment is None else build_environment(environment),
            seed=config.run.seed,
        )
        rewards = None if self.reward is None else self.reward.of_batch
        self.source.connect(
            RolloutSteps(prompts.train.read, collector, prompts.from_dataset, prompts.make_sample, rewards), self.engine
        )
        if config.evaluation is not None:
            self.evaluator = Evaluator(self.plan, self.models, self.loggers.warn, stack, self.step)
        self.rollout_log.truncate_after(self.step)
        if self.step:
            self.health.replay(read(self.plan.output_dir / "metrics.jsonl"))

    def step_values(self) -> dict[str, float]:
        """Return `rollout/*` of the step's samples, and write these to the rollout log if it is due."""
        sampled = self.source.take()
        if self.rollout_log.is_due(self.step):
            self.rollout_log.write(self.step, sampled.rollouts, sampled.rewards)
        metrics: dict[str, Metric] = dict(rollout_metrics(sampled.rollouts))
        metrics["rollout/staleness"] = Mean(self.step - 1 - sampled.version, 1)
        metrics["rollout/retried"] = Mean(self.engine.retried - self._retried, 1)
        self._retried = self.engine.retried
        if sampled.rewards:
            metrics["rollout/reward"] = Mean(sum(sampled.rewards), len(sampled.rewards))
            metrics["rollout/reward_max"] = Max(max(sampled.rewards))
        return values(metrics)

    def validate(self) -> dict[str, float]:
        self.source.wait()
        return super().validate()

    def update_engine(self) -> None:
        self.source.update_engine()

    def watch(self, record: Mapping[str, float]) -> None:
        """Watch as the base class; also warn of new alarms, and end the run if `health.action` is `stop`."""
        super().watch(record)
        for alarm in self.health.observe(record):
            self.loggers.warn(f"step {self.step}: {alarm}")
            if self.config.health.action == "stop":
                self.interrupt.requested = True

    def save(self) -> None:
        super().save()
        self.source.renew()


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
