"""Session of a run whose student samples its training data."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from nemo_opd.logging.jsonl import read
from nemo_opd.logging.metrics import values
from nemo_opd.rewards import build_reward
from nemo_opd.rollout.base import Sampling
from nemo_opd.rollout.collect import Collector
from nemo_opd.rollout.environments import build_environment
from nemo_opd.rollout.metrics import rollout_metrics
from nemo_opd.rollout.rollout_log import RolloutLog
from nemo_opd.training.engines import open_engine
from nemo_opd.training.evaluator import Evaluator
from nemo_opd.training.health import HealthMonitor
from nemo_opd.training.plan import Plan
from nemo_opd.training.prompts import Prompts
from nemo_opd.training.rollout_source import RolloutSource, RolloutSteps
from nemo_opd.training.session import Session
from nemo_opd.types import Max, Mean, Metric


class OnPolicySession(Session):
    """Session with rollouts, rewards and alarms about the student's health."""

    source: RolloutSource

    def __init__(self, plan: Plan, callbacks: Sequence[Any] = ()) -> None:
        super().__init__(plan, callbacks)
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
