"""The session of a run whose student samples its training data."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from nemo_opd.evaluation.shown import shown_answers
from nemo_opd.evaluation.tasks import PREFIX, evaluate_task
from nemo_opd.logging.base import ClosingTable, Score, ScoreRow
from nemo_opd.logging.jsonl import read
from nemo_opd.logging.metrics import values
from nemo_opd.logging.samples import SampleLog
from nemo_opd.rewards import build_reward
from nemo_opd.rollout.base import Generator, Sampling
from nemo_opd.rollout.collect import Collector
from nemo_opd.rollout.environments import build_environment
from nemo_opd.rollout.metrics import rollout_metrics
from nemo_opd.training.engines import TeacherWorkers, open_engine
from nemo_opd.training.health import HealthMonitor
from nemo_opd.training.plan import Plan
from nemo_opd.training.prompts import Prompts
from nemo_opd.training.rollout_source import RolloutSource, RolloutSteps
from nemo_opd.training.sampled_models import SampledModel
from nemo_opd.training.session import Session
from nemo_opd.types import Max, Mean, Metric


class OnPolicySession(Session):
    """A session with a rollout engine, rewards, evaluation, and monitoring of the student's health."""

    source: RolloutSource

    def __init__(self, plan: Plan, callbacks: Sequence[Any] = ()) -> None:
        super().__init__(plan, callbacks)
        self._retried = 0
        self.health = HealthMonitor(self.config.health)
        self.samples = SampleLog(plan.output_dir / "samples.jsonl")

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
        collector = self._collector(self.engine, prompts.student, sampling, rollout.max_new_tokens)
        rewards = None if self.reward is None else self.reward.of_batch
        self.source.connect(
            RolloutSteps(prompts.train.read, collector, prompts.from_dataset, prompts.make_sample, rewards), self.engine
        )
        self.samples.truncate_after(self.step)
        if self.step:
            self.health.replay(read(self.plan.output_dir / "metrics.jsonl"))

    def _collector(self, engine: Generator, model: SampledModel, sampling: Sampling, max_new_tokens: int) -> Collector:
        environment = self.config.environment
        return Collector(
            engine,
            model.renderer,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            max_length=model.max_length,
            environment=None if environment is None else build_environment(environment),
            seed=self.config.run.seed,
        )

    def rollout_values(self) -> dict[str, float]:
        """Return rollout/* of the step's samples."""
        sampled = self.source.take()
        metrics: dict[str, Metric] = dict(rollout_metrics(sampled.rollouts))
        metrics["rollout/staleness"] = Mean(self.step - 1 - sampled.version, 1)
        metrics["rollout/retried"] = Mean(self.engine.retried - self._retried, 1)
        self._retried = self.engine.retried
        if sampled.rewards:
            metrics["rollout/reward"] = Mean(sum(sampled.rewards), len(sampled.rewards))
            metrics["rollout/reward_max"] = Max(max(sampled.rewards))
        return values(metrics)

    def values_at_start(self) -> dict[str, float]:
        """Return the metrics of validation and evaluation, as far as the run has them."""
        values = super().values_at_start()
        if self.config.evaluation is None:
            return values
        self.end_before_first_step()
        values |= self.evaluate()
        self.end_before_first_step()
        return values | self.evaluate_teachers()

    def validate(self) -> dict[str, float]:
        self.source.wait()
        return super().validate()

    def evaluate(self) -> dict[str, float]:
        """Return eval/* of the student with its current weights."""
        self.loggers.phase("asking the student")
        self.source.update_engine()
        metrics = self._ask(self.engine, self.prompts.student)
        self.engine.rest()
        return metrics

    def evaluate_teachers(self) -> dict[str, float]:
        """Return eval/*/<teacher> of the evaluated teachers."""
        settings = self.config.evaluation
        assert settings is not None
        metrics: dict[str, float] = {}
        for i, model in enumerate(self.prompts.evaluated_teachers):
            teacher = self.config.active_names[i]
            self.loggers.phase(f"asking the teacher {teacher}")
            engine = TeacherWorkers(self.models, i, model.end_ids, settings.teacher_batch_size)
            metrics |= {f"{name}/{teacher}": value for name, value in self._ask(engine, model, teacher).items()}
        return metrics

    def _ask(self, engine: Generator, model: SampledModel, teacher: str | None = None) -> dict[str, float]:
        """Evaluate one model, write some of its answers to samples.jsonl, and return eval/*.

        teacher: name of the model, or None for the student.
        """
        settings, rollout = self.config.evaluation, self.config.rollout
        assert settings is not None
        assert rollout is not None
        assert self.reward is not None
        new = settings.max_new_tokens or rollout.max_new_tokens
        greedy = Sampling(temperature=0.0, needs_raw=False)
        sampling = Sampling(settings.temperature, settings.top_p, settings.top_k, needs_raw=False)
        result = evaluate_task(
            self._collector(engine, model, greedy, new) if settings.greedy else None,
            self._collector(engine, model, sampling, new),
            self.prompts.questions,
            self.reward,
            settings,
        )
        self.samples.write(shown_answers(result, self.step, settings.num_samples_shown, teacher))
        return result.metrics

    def watch(self, record: Mapping[str, float]) -> None:
        """Report new alarms, and end the run if `health.action` is `stop`."""
        super().watch(record)
        for alarm in self.health.observe(record):
            self.loggers.warn(f"step {self.step}: {alarm}")
            if self.config.health.action == "stop":
                self.interrupt.requested = True

    def save(self) -> None:
        super().save()
        self.source.renew()

    def closing_table(self) -> ClosingTable:
        records = read(self.plan.output_dir / "metrics.jsonl")
        evaluated = [record for record in records if any(name.startswith(PREFIX) for name in record)]
        rows = scores(evaluated[0], evaluated[-1], self.config.active_names) if evaluated else ()
        return replace(super().closing_table(), scores=rows)


def scores(first: Mapping[str, float], last: Mapping[str, float], teachers: Sequence[str]) -> tuple[ScoreRow, ...]:
    """Return the measures with a confidence interval, from the records of the first and the last evaluation.

    teachers: names; the first record has the results of evaluated teachers.
    """

    def score(record: Mapping[str, float], name: str, of: str = "") -> Score:
        return Score(record[f"{name}{of}"], record[f"{name}_low{of}"], record[f"{name}_high{of}"])

    names = [name for name in last if name.startswith(PREFIX) and f"{name}_low" in last and name.count("/") == 1]
    has_before = first["step"] < last["step"]
    return tuple(
        ScoreRow(
            name.removeprefix(PREFIX),
            score(first, name) if has_before and name in first else None,
            score(last, name),
            {teacher: score(first, name, f"/{teacher}") for teacher in teachers if f"{name}/{teacher}" in first},
        )
        for name in names
    )
