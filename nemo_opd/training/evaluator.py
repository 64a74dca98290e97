"""Evaluation of a run's student and teachers on question sets and benchmarks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from nemo_opd.data.record import Prompt
from nemo_opd.errors import ClusterError, OPDError
from nemo_opd.evaluation.inputs import build_set_reward
from nemo_opd.evaluation.likelihoods import Scorer
from nemo_opd.evaluation.sets import ask
from nemo_opd.evaluation.shown import shown_answers
from nemo_opd.evaluation.tasks import EvaluationResult
from nemo_opd.logging.question_values import QuestionValues, ValueLog
from nemo_opd.logging.samples import SampleLog
from nemo_opd.rewards import RewardFunction
from nemo_opd.rollout.base import Generator
from nemo_opd.training.engines import TeacherWorkers
from nemo_opd.training.models import Models
from nemo_opd.training.plan import Plan
from nemo_opd.training.questions import LoadedSet
from nemo_opd.training.sampled_models import SampledModel

if TYPE_CHECKING:
    from nemo_opd.evaluation.language_model import TextModel


class Evaluator:
    """Evaluator with the rewards and logs of the question sets; `stack` closes it.

    A failure outside the workers is a warning, unless `evaluation.on_error=stop`.
    """

    def __init__(self, plan: Plan, models: Models, warn: Callable[[str], None], stack: ExitStack, step: int) -> None:
        """Open rewards and logs. step: step that the run continues from; log entries of later steps are dropped."""
        self._plan, self._config, self._models, self._warn = plan, plan.config, models, warn
        assert plan.config.evaluation is not None
        self._settings = plan.config.evaluation
        self._rewards = [stack.enter_context(build_set_reward(loaded.resolved)) for loaded in plan.questions]
        self._samples = SampleLog(plan.output_dir / "samples.jsonl")
        self._values = ValueLog(plan.output_dir / "evaluation.jsonl")
        self._samples.truncate_after(step)
        self._values.truncate_after(step)

    def student(self, engine: Generator, step: int) -> dict[str, float]:
        """Evaluate the student and return eval/*."""
        figures: dict[str, float] = {}
        for loaded, reward in zip(self._plan.questions, self._rewards, strict=True):
            figures |= self._ask(engine, loaded, loaded.student, reward, step)
        if (benchmarks := self._plan.benchmarks) is not None:
            figures |= self._run_benchmarks(benchmarks.student.text, self._models.likelihoods, engine, step)
        return figures

    def teacher(self, i: int) -> dict[str, float]:
        """Evaluate active teacher i and return eval/*/<teacher>."""
        name = self._config.active_names[i]
        figures: dict[str, float] = {}
        for loaded, reward in zip(self._plan.questions, self._rewards, strict=True):
            model = loaded.teachers[i]
            engine = TeacherWorkers(self._models, i, model.end_ids)
            figures |= self._ask(engine, loaded, model, reward, 0, name)
        if (benchmarks := self._plan.benchmarks) is not None:
            teacher = benchmarks.teachers[i]
            engine = TeacherWorkers(self._models, i, teacher.end_ids)
            scorer = partial(self._models.likelihoods, teacher=i)
            figures |= self._run_benchmarks(teacher.text, scorer, engine, 0, name)
        return {f"{figure}/{name}": value for figure, value in figures.items()}

    def _run_benchmarks(
        self, text: TextModel, scorer: Scorer, engine: Generator, step: int, teacher: str | None = None
    ) -> dict[str, float]:
        """Run all benchmarks with one model, log a value per question, and return eval/*."""
        from nemo_opd.evaluation.benchmarks import run_benchmark
        from nemo_opd.evaluation.language_model import LanguageModel

        assert self._plan.benchmarks is not None
        model, settings = LanguageModel(text, scorer, engine), self._settings
        figures: dict[str, float] = {}
        for loaded in self._plan.benchmarks.loaded:
            result = None
            with self._reported(f"asking {_who(teacher)} failed after step {step}"):
                allows_code = settings.confirm_run_unsafe_code
                result = run_benchmark(loaded, model, settings.confidence, allows_code=allows_code)
            if result is None:
                continue
            for metric, by_question in result.values.items():
                lower = (metric,) if metric in result.lower_is_better else ()
                values = {metric: tuple(by_question.values())}
                self._values.write(QuestionValues(step, result.name, teacher, tuple(by_question), values, lower))
            figures |= result.metrics
        return figures

    def _ask(
        self,
        engine: Generator,
        loaded: LoadedSet,
        model: SampledModel,
        reward: RewardFunction,
        step: int,
        teacher: str | None = None,
    ) -> dict[str, float]:
        """Evaluate one model on a question set, log its answers, and return eval/*, empty after a failure."""
        resolved, who = loaded.resolved, _who(teacher)
        result: EvaluationResult | None = None
        with self._reported(f"{resolved.label}: asking {who} failed after step {step}"):
            result = self._answered(engine, loaded, model, reward)
        if result is None:
            return {}
        if result.failures:
            self._warn(result.failure_text(f"{resolved.label}, {who}"))
        self._samples.write(shown_answers(result, step, self._settings.num_samples_shown, teacher))
        questions = tuple(_name(question.prompt) for question in result.questions)
        self._values.write(QuestionValues(step, resolved.name, teacher, questions, result.values, levels=result.levels))
        return result.metrics

    @contextmanager
    def _reported(self, failure: str) -> Iterator[None]:
        """Turn an OPDError into a warning. Reraise it with `on_error=stop`, or if it ended the workers."""
        try:
            yield
        except ClusterError:
            raise
        except OPDError as error:
            if self._settings.on_error == "stop":
                raise
            self._warn(f"{failure}: {error}")

    def _answered(
        self, engine: Generator, loaded: LoadedSet, model: SampledModel, reward: RewardFunction
    ) -> EvaluationResult:
        config, resolved = self._config, loaded.resolved
        return ask(
            resolved,
            loaded.prompts,
            reward,
            engine,
            model.renderer,
            max_new_tokens=config.new_tokens(resolved.name),
            max_length=model.max_length,
            environment=config.environment,
            seed=config.run.seed,
            failures_are_wrong=self._settings.on_error == "warn",
        )


def _who(teacher: str | None) -> str:
    return "the student" if teacher is None else f"the teacher {teacher}"


def _name(question: Prompt) -> str:
    """Return a question's row and content hash, so that another question in the same row gets another name."""
    content = json.dumps([question.content, question.answer], ensure_ascii=False, default=str)
    return f"{question.index}:{zlib.crc32(content.encode()):08x}"
