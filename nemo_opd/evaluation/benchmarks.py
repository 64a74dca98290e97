"""A model's metrics on lm-eval benchmarks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from lm_eval.evaluator import evaluate

from nemo_opd.config.evaluation import Benchmark
from nemo_opd.errors import OPDError, RolloutError
from nemo_opd.evaluation.benchmark_tasks import LoadedBenchmark, as_lm_eval_runs
from nemo_opd.evaluation.estimates import Estimate, mean_with_interval
from nemo_opd.evaluation.language_model import LanguageModel
from nemo_opd.evaluation.tasks import named, with_bounds

_RESAMPLES = 1000
"""Resamples for the standard error of a metric that is not a mean over questions."""


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """A model's metrics on one benchmark."""

    name: str
    estimates: Mapping[str, Estimate]
    """Value and interval of each metric; the interval has no width if lm-eval gives no standard error."""
    values: Mapping[str, Mapping[str, float]]
    """Value of each question, keyed by metric and question name, for metrics that are means over questions."""
    lower_is_better: tuple[str, ...]
    """Metrics for which lower is better."""
    num_questions: int

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics under their logged names: eval/<name>/acc, eval/<name>/acc_low, …"""
        return named(with_bounds(self.estimates), self.name)


def run_benchmark(
    loaded: LoadedBenchmark, model: LanguageModel, confidence: float, *, allows_code: bool
) -> BenchmarkResult:
    """Evaluate a model on a benchmark.

    Raises the model's errors, and RolloutError for an error in a task's own code.
    """
    benchmark = loaded.settings
    try:
        with as_lm_eval_runs():
            results = evaluate(
                lm=model,
                task_dict=loaded.tasks,
                limit=benchmark.limit,
                bootstrap_iters=_RESAMPLES,
                apply_chat_template=benchmark.chat,
                fewshot_as_multiturn=benchmark.chat,
                confirm_run_unsafe_code=allows_code,
            )
    except OPDError:
        raise
    except Exception as error:
        raise RolloutError(f"benchmark {benchmark.label}: lm-eval failed: {type(error).__name__}: {error}") from error
    return _result(benchmark, results, confidence)


def _result(benchmark: Benchmark, results: Mapping[str, Any], confidence: float) -> BenchmarkResult:
    """Return the metrics of the task or group, or of a group's tasks if the group has none."""
    samples, scores = results["samples"], results["results"]
    names = [benchmark.task] if _metrics(scores.get(benchmark.task, {})) else list(samples)
    estimates: dict[str, Estimate] = {}
    values: dict[str, Mapping[str, float]] = {}
    lower: list[str] = []
    for name in names:
        task_samples = {task: samples.get(task, ()) for task in _tasks_of(name, results)}
        is_higher_better = results.get("higher_is_better", {}).get(name, {})
        prefix = "" if name == benchmark.task else f"{name}."
        for metric, (key, value) in _metrics(scores[name]).items():
            by_question = _by_question(task_samples, *key.split(",", 1))
            if by_question and math.isclose(
                math.fsum(by_question.values()) / len(by_question), value, rel_tol=1e-9, abs_tol=1e-12
            ):
                values[prefix + metric] = by_question
                estimates[prefix + metric] = mean_with_interval(tuple(by_question.values()), confidence)
            else:
                estimates[prefix + metric] = _normal_interval(value, scores[name].get(_error_key(key)), confidence)
            if is_higher_better.get(key.split(",")[0]) is False:
                lower.append(prefix + metric)
    num_questions = sum(len({sample["doc_id"] for sample in task_samples}) for task_samples in samples.values())
    return BenchmarkResult(benchmark.label, estimates, values, tuple(lower), num_questions)


def _metrics(scores: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Return (lm-eval's key, value) for each of our metric names; keys are `acc,none`, `exact_match,strict-match`."""
    return {
        key.removesuffix(",none").replace(",", "."): (key, float(value))
        for key, value in scores.items()
        if "," in key and "_stderr," not in key and isinstance(value, int | float)
    }


def _error_key(key: str) -> str:
    metric, _, filter_name = key.partition(",")
    return f"{metric}_stderr,{filter_name}"


def _tasks_of(name: str, results: Mapping[str, Any]) -> Iterator[str]:
    """Yield a task's own name, or the tasks of a group and its subgroups."""
    members = results.get("group_subtasks", {}).get(name) or []
    if not members:
        yield name
    for member in members:
        yield from _tasks_of(member, results)


def _by_question(samples: Mapping[str, Sequence[Mapping[str, Any]]], metric: str, filter_name: str) -> dict[str, float]:
    """Return the metric of each question, or an empty dict if a question has no finite value.

    samples: samples of each task. A question's name consists of its task, its index and a hash of its row.
    """
    values = {
        f"{task}:{sample['doc_id']}:{sample['doc_hash'][:8]}": sample.get(metric)
        for task, task_samples in samples.items()
        for sample in task_samples
        if sample.get("filter", "none") == filter_name
    }
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    return numbers if len(numbers) == len(values) and all(map(math.isfinite, numbers.values())) else {}


def _normal_interval(value: float, error: object, confidence: float) -> Estimate:
    """Return the normal interval for a standard error, without a width if the error is missing."""
    has_error = isinstance(error, int | float) and math.isfinite(error)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * float(error) if has_error else 0.0  # type: ignore[arg-type]
    return Estimate(value, value - half, value + half)
