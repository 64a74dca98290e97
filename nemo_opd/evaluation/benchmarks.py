"""Benchmarks of lm-eval: their tasks, and what a model gets in them."""

import logging
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from statistics import NormalDist
from typing import Any
from unittest.mock import patch

import numpy as np
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from nemo_opd.config.evaluation import Benchmark, QuestionSets
from nemo_opd.demo import is_demo
from nemo_opd.demo.tasks import task_folder
from nemo_opd.errors import ConfigError, DataError, OPDError, RolloutError
from nemo_opd.evaluation.estimates import Estimate, mean_with_interval
from nemo_opd.evaluation.language_model import LanguageModel
from nemo_opd.evaluation.tasks import named, with_bounds
from nemo_opd.progress import tracked

_SEED, _NUMPY_SEED, _FEW_SHOT_SEED = 0, 1234, 1234
"""Seeds of lm-eval's `simple_evaluate`, so that tasks that shuffle and draw do it alike."""
_RESAMPLES = 1000
"""Resamples for the standard error of a metric that is no mean over questions."""
_NUM_NAMES = 5
"""Names that are suggested for an unknown one."""


@dataclass(frozen=True, slots=True)
class LoadedBenchmark:
    """A benchmark with its tasks and their data."""

    settings: Benchmark
    tasks: Mapping[str, Any]
    """Result of `TaskManager.load`."""


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


def load_benchmarks(settings: QuestionSets, prefix: str) -> tuple[LoadedBenchmark, ...]:
    """Load the tasks of all benchmarks, with their data.

    prefix: of the settings' keys, such as `evaluation.`. Raises ConfigError for a task that there is not or that may
    not run, and DataError for data that cannot be read.
    """
    if not settings.benchmarks:
        return ()
    with _as_lm_eval_runs():
        manager = _manager(settings)
        benchmarks = tracked(settings.benchmarks, "reading the data of benchmarks", "benchmarks")
        return tuple(_load(each, manager, settings, f"{prefix}benchmarks.{i}") for i, each in enumerate(benchmarks))


def _manager(settings: QuestionSets) -> TaskManager:
    """Return the manager of the tasks: of the folder alone where it has all, since lm-eval's own are thousands."""
    if settings.task_folder is None:
        return TaskManager()
    folder = task_folder() if is_demo(settings.task_folder) else Path(settings.task_folder).expanduser()
    own = TaskManager(include_path=str(folder), include_defaults=False)
    if {each.task for each in settings.benchmarks} <= set(own.all_tasks):
        return own
    return TaskManager(include_path=str(folder))


def _load(benchmark: Benchmark, manager: TaskManager, settings: QuestionSets, key: str) -> LoadedBenchmark:
    if benchmark.task not in manager.all_tasks:
        near = get_close_matches(benchmark.task, manager.all_tasks, _NUM_NAMES)
        hint = f"; near names are {', '.join(near)}" if near else ""
        raise ConfigError(
            f"{key}.task={benchmark.task!r}: lm-eval has no such task{hint}; `lm-eval ls tasks` lists all, and "
            "evaluation.task_folder names a folder with further ones"
        )
    if settings.confirm_run_unsafe_code:
        os.environ.setdefault("HF_ALLOW_CODE_EVAL", "1")
    try:
        loaded = manager.load([benchmark.task])
    except Exception as error:  # whatever the hub, `datasets` and the task's own code raise
        raise DataError(f"{key}.task={benchmark.task}: {_unavailable(benchmark.task, error)}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) and not settings.confirm_run_unsafe_code:
            raise ConfigError(
                f"{key}.task={benchmark.task}: {name} runs programs that the model writes, and lm-eval runs them "
                "without a sandbox, as this user; write evaluation.confirm_run_unsafe_code=true where that may be, or "
                "use a set of evaluation.sets with reward.type=code, which runs programs in one"
            )
        _configure(task, benchmark, f"{key}.shots={benchmark.shots}: {name}")
    return LoadedBenchmark(benchmark, loaded)


def _unavailable(task: str, error: Exception) -> str:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return (
        f"its data cannot be read ({reason}); where there is a network, fetch them into the cache with "
        f'`HF_HUB_OFFLINE=0 HF_DATASETS_OFFLINE=0 python -c "from lm_eval.tasks import TaskManager; '
        f"TaskManager().load(['{task}'])\"`, and copy $HF_HOME where this machine has none"
    )


def _configure(task: Any, benchmark: Benchmark, where: str) -> None:
    """Set the number of examples. Raises ConfigError, which begins with `where`, for a task that fixes it at 0."""
    default = task.get_config("num_fewshot")
    if benchmark.shots and default == 0:
        raise ConfigError(f"{where} is asked without examples alone; leave shots out")
    if benchmark.shots is not None:
        task.set_config(key="num_fewshot", value=benchmark.shots)
    elif default is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=_FEW_SHOT_SEED)


def run_benchmark(
    loaded: LoadedBenchmark, model: LanguageModel, confidence: float, *, allows_code: bool
) -> BenchmarkResult:
    """Ask a model the questions of a benchmark.

    Raises what the model raises, and RolloutError for what a task's own code raises.
    """
    benchmark = loaded.settings
    try:
        with _as_lm_eval_runs():
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


def figure_names(loaded: LoadedBenchmark) -> set[str]:
    """Return the names of metrics that a benchmark's tasks have, without the names of tasks before them."""
    names: set[str] = set()
    for task in loaded.tasks["tasks"].values():
        choices = [each["name"] for each in task.get_config("filter_list") or ()] or ["none"]
        names |= {
            metric if choice == "none" else f"{metric}.{choice}"
            for metric in task.higher_is_better()
            for choice in choices
        }
    return names


@contextmanager
def _as_lm_eval_runs() -> Iterator[None]:
    """Seed what tasks draw from, and leave out processes, bars and the log: errors are raised, and the run shows its
    own progress. All is restored afterwards.
    """
    log = logging.getLogger("lm_eval")
    level, drawn, drawn_by_numpy = log.level, random.getstate(), np.random.get_state()
    log.setLevel(logging.ERROR)
    random.seed(_SEED)
    np.random.seed(_NUMPY_SEED)
    try:
        # A process forked from this one, with its threads, may wait forever.
        with patch.dict(os.environ, {"DISABLE_MULTIPROC": "1"}), patch("lm_eval.api.task.tqdm", _without_bar):
            yield
    finally:
        log.setLevel(level)
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)


def _without_bar(each: Iterable[Any], **_: Any) -> Iterable[Any]:
    return each
