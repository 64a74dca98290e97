"""A session whose student samples what it learns from."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

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
from nemo_opd.training.rollout_source import Parts, RolloutSource
from nemo_opd.training.sampled_models import SampledModel
from nemo_opd.training.session import Session
from nemo_opd.types import Max, Mean, Metric


class OnPolicySession(Session):
    """Adds the engine that samples, rewards, evaluation, and an eye on the student's health."""

    source: RolloutSource

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._retried = 0
        self.health = HealthMonitor(self.config.health)
        self.samples = SampleLog(plan.output_dir / "samples.jsonl")

    @property
    def prompts(self) -> Prompts:
        assert isinstance(self.plan.data, Prompts)
        return self.plan.data

    def open_source(self) -> RolloutSource:
        return RolloutSource(self.config, len(self.prompts.train), self.plan.total_steps)

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
            Parts(prompts.train.read, collector, prompts.from_dataset, prompts.make_sample, rewards), self.engine
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

    def of_rollouts(self) -> dict[str, float]:
        """What is to be said of the sequences that the step learned from."""
        collected = self.source.take()
        metrics: dict[str, Metric] = dict(rollout_metrics(collected.rollouts))
        metrics["rollout/staleness"] = Mean(self.step - 1 - collected.version, 1)
        metrics["rollout/retried"] = Mean(self.engine.retried - self._retried, 1)
        self._retried = self.engine.retried
        if collected.rewards:
            metrics["rollout/reward"] = Mean(sum(collected.rewards), len(collected.rewards))
            metrics["rollout/reward_max"] = Max(max(collected.rewards))
        return values(metrics)

    def values_at_start(self) -> dict[str, float]:
        """Of validation and of the questions, where there are any."""
        values = super().values_at_start()
        return values if self.config.evaluation is None else values | self.evaluate() | self.evaluate_teachers()

    def validate(self) -> dict[str, float]:
        self.source.wait()
        return super().validate()

    def evaluate(self) -> dict[str, float]:
        """eval/* of the student as it is now."""
        self.loggers.phase("asking the student")
        self.source.settle()
        return self._ask(self.engine, self.prompts.student)

    def evaluate_teachers(self) -> dict[str, float]:
        """eval/*/<teacher> of those that are asked."""
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
        """eval/*, once what is shown of the answers is written.

        teacher: the name of the one that is asked; None: the student is.
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
        """Tell of new signs of trouble as well, and end the run where `health.action` says so."""
        super().watch(record)
        for alarm in self.health.observe(record):
            self.loggers.warn(f"step {self.step}: {alarm}")
            if self.config.health.action == "stop":
                self.interrupt.requested = True

    def save(self) -> None:
        super().save()
        self.source.renew()

    def closing_table(self) -> ClosingTable:
        asked = [record for record in read(self.plan.output_dir / "metrics.jsonl") if is_asked(record)]
        rows = scores(asked[0], asked[-1], self.config.active_names) if asked else ()
        return replace(super().closing_table(), scores=rows)


def is_asked(record: Mapping[str, float]) -> bool:
    return any(name.startswith(PREFIX) for name in record)


def scores(first: Mapping[str, float], last: Mapping[str, float], teachers: Sequence[str]) -> tuple[ScoreRow, ...]:
    """What has a confidence interval, from the records of the first and the last evaluation.

    teachers: names; the first record has what they reached, where they were asked.
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
