"""Evaluation of a run's models on questions and benchmarks, continued texts, best steps and early stopping."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nemo_opd.alignment.token_roles import stop_ids
from nemo_opd.checkpoint.manager import BestMetric
from nemo_opd.config.train import ChosenMetric, EarlyStopping, KeepBest
from nemo_opd.data.row_types import Prompt
from nemo_opd.errors import ClusterError, OPDError
from nemo_opd.evaluation.likelihoods import Scorer
from nemo_opd.evaluation.question_sets import build_set_reward
from nemo_opd.evaluation.questions import EvaluationResult, ask, shown_answers
from nemo_opd.logging.scores import SAMPLE_LOG, QuestionValues, SampleLog, ShownAnswer, ValueLog
from nemo_opd.models.load import tokenizer_of
from nemo_opd.preflight.plan import Plan
from nemo_opd.preflight.prompts import LoadedSet, SampledModel
from nemo_opd.rewards import RewardFunction
from nemo_opd.rollout.engine_interface import Generator
from nemo_opd.training.models import Models

if TYPE_CHECKING:
    from nemo_opd.evaluation.benchmarks import TextModel


_BEST, _WAITED = "best", "waited"
_MAX_PROMPT, _NUM_NEW = 48, 32
"""Tokens of a text's start, and of its continuation."""


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
        self._samples = SampleLog(plan.output_dir / SAMPLE_LOG)
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
            engine = self._models.answering_teacher(i, model.end_ids)
            figures |= self._ask(engine, loaded, model, reward, 0, name)
        if (benchmarks := self._plan.benchmarks) is not None:
            teacher = benchmarks.teachers[i]
            engine = self._models.answering_teacher(i, teacher.end_ids)
            scorer = partial(self._models.likelihoods, teacher=i)
            figures |= self._run_benchmarks(teacher.text, scorer, engine, 0, name)
        return {f"{figure}/{name}": value for figure, value in figures.items()}

    def _run_benchmarks(
        self, text: TextModel, scorer: Scorer, engine: Generator, step: int, teacher: str | None = None
    ) -> dict[str, float]:
        """Run all benchmarks with one model, log a value per question, and return eval/*."""
        from nemo_opd.evaluation.benchmarks import LanguageModel, run_benchmark

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
                self._values.write([QuestionValues(step, result.name, teacher, tuple(by_question), values, lower)])
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
        config, resolved, who = self._config, loaded.resolved, _who(teacher)
        result: EvaluationResult | None = None
        with self._reported(f"{resolved.label}: asking {who} failed after step {step}"):
            result = ask(
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
        if result is None:
            return {}
        if result.failures:
            self._warn(result.failure_text(f"{resolved.label}, {who}"))
        self._samples.write(shown_answers(result, step, self._settings.num_samples_shown, teacher))
        questions = tuple(_question_name(question.prompt) for question in result.questions)
        self._values.write(
            [QuestionValues(step, resolved.name, teacher, questions, result.values, levels=result.levels)]
        )
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


def _who(teacher: str | None) -> str:
    return "the student" if teacher is None else f"the teacher {teacher}"


def _question_name(question: Prompt) -> str:
    """Return a question's row and content hash, so that another question in the same row gets another name."""
    content = json.dumps([question.content, question.answer], ensure_ascii=False, default=str)
    return f"{question.index}:{zlib.crc32(content.encode()):08x}"


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


def continued_texts(plan: Plan, models: Models, step: int) -> list[ShownAnswer]:
    """Return the likeliest continuations of the first validation texts.

    Empty without any, with `continued_texts=0`, and on-policy, where the report has rollouts and answers.
    The prompt of a text is at most its first half; of a conversation, all before the first learned message. Texts that
    leave no room in `train.max_length` are left out.
    """
    number = plan.config.logging.continued_texts
    if plan.data.validation is None or not number or plan.config.rollout is not None:
        return []
    batch = next(plan.data.validation_batches(number)).student
    texts = [ids[:length].numpy().astype(np.int32) for ids, length in zip(batch.ids, batch.lengths, strict=True)]
    starts = [_prompt_length(mask.numpy(), len(ids)) for mask, ids in zip(batch.loss_mask, texts, strict=True)]
    longest = plan.config.train.max_length - _NUM_NEW
    rows = [row for row, start in enumerate(starts) if 0 < start <= longest]
    if not rows:
        return []
    tokenizer = tokenizer_of(plan.config.student, key="student")
    ends = stop_ids(tokenizer)
    continuations = models.continue_greedily([texts[row][: starts[row]] for row in rows], _NUM_NEW)
    shown = []
    for row, ids in zip(rows, continuations, strict=True):
        end = next((i for i, token in enumerate(ids) if token in ends), None)
        prompt, rest = np.split(texts[row], [starts[row]])
        shown.append(
            ShownAnswer(
                step=step,
                question=row,
                kind="continued",
                sample=0,
                prompt=str(tokenizer.decode(prompt)),
                answer=str(tokenizer.decode(rest[:_NUM_NEW], skip_special_tokens=True)),
                response=str(tokenizer.decode(ids[:end], skip_special_tokens=True)),
                reward=None,
                finish_reason="length" if end is None else "stop",
                num_tokens=_NUM_NEW if end is None else end + 1,
            )
        )
    return shown


def _prompt_length(loss_mask: np.ndarray, length: int) -> int:
    """Return the number of tokens to continue. loss_mask: [S], the tokens to learn; length: tokens of the text."""
    first = int(loss_mask.argmax())  # 1 in a text without a chat template
    return first if first > 1 else min(_MAX_PROMPT, length // 2)
