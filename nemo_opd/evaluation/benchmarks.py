"""Figures of a model in benchmarks of lm-eval."""

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
"""Resamples for the standard error of a metric that is no mean over questions."""


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """Figures of a model in a benchmark."""

    name: str
    estimates: Mapping[str, Estimate]
    """Metric → its value and interval, without a width where lm-eval gives no standard error."""
    values: Mapping[str, Mapping[str, float]]
    """Metric that is a mean over questions → the value of each question, by the question's name."""
    lower_is_better: tuple[str, ...]
    """Metrics that are better the lower they are."""
    num_questions: int

    @property
    def metrics(self) -> dict[str, float]:
        """Figures as they are logged: eval/<name>/acc, eval/<name>/acc_low, …"""
        return named(with_bounds(self.estimates), self.name)


def run_benchmark(
    loaded: LoadedBenchmark, model: LanguageModel, confidence: float, *, allows_code: bool
) -> BenchmarkResult:
    """Ask a model the questions of a benchmark.

    Raises what the model raises, and RolloutError for what a task's own code raises.
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
    """Return the figures of the task or the group; of a group without figures, those of its tasks."""
    samples, found = results["samples"], results["results"]
    names = [benchmark.task] if _figures(found.get(benchmark.task, {})) else list(samples)
    estimates: dict[str, Estimate] = {}
    values: dict[str, Mapping[str, float]] = {}
    lower: list[str] = []
    for name in names:
        own = {task: samples.get(task, ()) for task in _tasks_of(name, results)}
        is_higher_better = results.get("higher_is_better", {}).get(name, {})
        lead = "" if name == benchmark.task else f"{name}."
        for metric, (key, value) in _figures(found[name]).items():
            each = _by_question(own, *key.split(",", 1))
            if each and math.isclose(math.fsum(each.values()) / len(each), value, rel_tol=1e-9, abs_tol=1e-12):
                values[lead + metric] = each
                estimates[lead + metric] = mean_with_interval(tuple(each.values()), confidence)
            else:
                estimates[lead + metric] = _by_error(value, found[name].get(_error_key(key)), confidence)
            if is_higher_better.get(key.split(",")[0]) is False:
                lower.append(lead + metric)
    number = sum(len({sample["doc_id"] for sample in own}) for own in samples.values())
    return BenchmarkResult(benchmark.label, estimates, values, tuple(lower), number)


def _figures(found: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Return metrics by our name: lm-eval's key, `acc,none` or `exact_match,strict-match`, and the value."""
    return {
        key.removesuffix(",none").replace(",", "."): (key, float(value))
        for key, value in found.items()
        if "," in key and "_stderr," not in key and isinstance(value, int | float)
    }


def _error_key(key: str) -> str:
    metric, _, choice = key.partition(",")
    return f"{metric}_stderr,{choice}"


def _tasks_of(name: str, results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tasks of a group, in groups within it too, or a task itself."""
    inner = results.get("group_subtasks", {}).get(name) or []
    if not inner:
        yield name
    for each in inner:
        yield from _tasks_of(each, results)


def _by_question(samples: Mapping[str, Sequence[Mapping[str, Any]]], metric: str, choice: str) -> dict[str, float]:
    """Return the metric by question; nothing where one has no finite number.

    samples: those of each task. A question's name is its task, its place and a hash of its row.
    """
    found = {
        f"{task}:{sample['doc_id']}:{sample['doc_hash'][:8]}": sample.get(metric)
        for task, own in samples.items()
        for sample in own
        if sample.get("filter", "none") == choice
    }
    numbers = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    return numbers if len(numbers) == len(found) and all(map(math.isfinite, numbers.values())) else {}


def _by_error(value: float, error: object, confidence: float) -> Estimate:
    """Return the normal interval of a standard error; without a width where there is none."""
    known = isinstance(error, int | float) and math.isfinite(error)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * float(error) if known else 0.0  # type: ignore[arg-type]
    return Estimate(value, value - half, value + half)
