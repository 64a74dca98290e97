"""Benchmarks of a run: their tasks and the models that answer them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import GenerationConfig

from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.errors import ConfigError
from nemo_opd.evaluation.inputs import is_left_out
from nemo_opd.evaluation.likelihoods import longest_request
from nemo_opd.models.load import load_config
from nemo_opd.preflight.model_info import ModelInfo
from nemo_opd.rollout.hf import end_ids

if TYPE_CHECKING:
    from nemo_opd.evaluation.benchmark_tasks import LoadedBenchmark
    from nemo_opd.evaluation.benchmarks import TextModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BenchmarkedModel:
    """A model that answers benchmarks."""

    text: TextModel
    end_ids: frozenset[int]
    """Tokens that end an answer."""


@dataclass(frozen=True, slots=True)
class Benchmarks:
    """Benchmarks of an evaluation and the models that answer them."""

    loaded: tuple[LoadedBenchmark, ...]
    student: BenchmarkedModel
    teachers: tuple[BenchmarkedModel, ...]
    """The active teachers, or none with evaluation.teachers=false."""


def longest_question(benchmarks: Benchmarks | None, teacher: int | None = None) -> int:
    """Return the token limit of a question with its answer for the student or a teacher; 0 if it answers none."""
    if benchmarks is None:
        return 0
    models = (benchmarks.student,) if teacher is None else benchmarks.teachers[teacher : teacher + 1]
    return max((model.text.max_length for model in models), default=0)


def load_tasks(config: RunConfig) -> tuple[LoadedBenchmark, ...]:
    """Load the tasks of all benchmarks; none if the demo runs without lm-eval.

    Raises the errors of `load_benchmarks`, and ConfigError if `train.keep_best` or `early_stopping` names a metric that
    its benchmark lacks.
    """
    evaluation = config.evaluation
    if evaluation is None or not evaluation.benchmarks:
        return ()
    if is_left_out(evaluation):
        _log.warning("skipping the demo's benchmark, since lm-eval is not installed (`pip install 'nemo-opd[eval]'`)")
        return ()
    from nemo_opd.evaluation.benchmark_tasks import load_benchmarks  # needs an optional library

    loaded = load_benchmarks(evaluation, "evaluation.")
    for key, settings in (("keep_best", config.train.keep_best), ("early_stopping", config.train.early_stopping)):
        if settings is not None:
            _check_metric(settings.metric, f"train.{key}.metric", loaded)
    return loaded


def plan_benchmarks(
    config: RunConfig, loaded: tuple[LoadedBenchmark, ...], student: ModelInfo, teachers: Sequence[ModelInfo]
) -> Benchmarks | None:
    """Return the benchmarks with the models that answer them, or None without benchmarks.

    Raises ConfigError if a benchmark uses chat and a model has no chat template.
    """
    if not loaded:
        return None
    assert config.evaluation is not None
    pairs = zip(config.active_teachers, teachers, strict=True) if config.evaluation.teachers else ()
    return Benchmarks(
        loaded,
        _benchmarked(config, config.student, student, "student"),
        tuple(_benchmarked(config, settings, info, f"teachers.{i}") for i, (settings, info) in enumerate(pairs)),
    )


def _check_metric(metric: str, key: str, loaded: Sequence[LoadedBenchmark]) -> None:
    """Raise ConfigError if the metric names a benchmark that lacks it."""
    from nemo_opd.evaluation.benchmark_tasks import figure_names

    for benchmark in loaded:
        prefix, figures = f"eval/{benchmark.settings.label}/", figure_names(benchmark)
        name = metric.removeprefix(prefix)
        if metric.startswith(prefix) and not any(name == figure or name.endswith(f".{figure}") for figure in figures):
            choices = ", ".join(prefix + figure for figure in sorted(figures))
            raise ConfigError(f"{key}={metric}: the benchmark has no such metric; choose from {choices}")


def _benchmarked(config: RunConfig, settings: Student | Teacher, info: ModelInfo, key: str) -> BenchmarkedModel:
    from nemo_opd.evaluation.benchmarks import TextModel

    assert config.evaluation is not None
    chats = [benchmark.task for benchmark in config.evaluation.benchmarks if benchmark.chat]
    if chats and info.tokenizer.chat_template is None:
        raise ConfigError(
            f"{key}: the tokenizer has no chat template, but the benchmark {chats[0]} has chat=true; set chat: false, "
            f"or name a template in {key}.chat_template"
        )
    model = load_config(settings.reference, key=f"{key}.model")
    longest = longest_request(config.evaluation, info.positions)
    return BenchmarkedModel(
        TextModel(info.tokenizer, longest, settings.chat_template_kwargs, config.run.seed),
        end_ids(info.tokenizer, GenerationConfig.from_model_config(model)),
    )
