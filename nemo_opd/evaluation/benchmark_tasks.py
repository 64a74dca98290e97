"""Tasks of lm-eval with their data, loaded without PyTorch."""

import logging
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from jinja2 import TemplateError
from lm_eval.tasks import TaskManager

from nemo_opd.config.evaluation import Benchmark, QuestionSets
from nemo_opd.demo import is_demo
from nemo_opd.demo.tasks import task_folder
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.evaluation.task_names import require_tasks
from nemo_opd.progress import tracked

_SEED, _NUMPY_SEED, _FEW_SHOT_SEED = 0, 1234, 1234
"""Seeds of lm-eval's `simple_evaluate`, so that tasks that shuffle and draw do it alike."""


@dataclass(frozen=True, slots=True)
class LoadedBenchmark:
    """A benchmark with its tasks and their data."""

    settings: Benchmark
    tasks: Mapping[str, Any]
    """Result of `TaskManager.load`."""


def check_tasks(settings: QuestionSets, prefix: str) -> None:
    """Raise what `load_benchmarks` raises, as far as it takes seconds: where all tasks are of `task_folder` they are
    loaded, else looked up.
    """
    own = _tasks_of_folder(settings)
    require_tasks(settings, prefix, own.all_tasks)
    if _has_all(own, settings):
        load_benchmarks(settings, prefix)


def load_benchmarks(settings: QuestionSets, prefix: str) -> tuple[LoadedBenchmark, ...]:
    """Load the tasks of all benchmarks, with their data.

    prefix: of the settings' keys, such as `evaluation.`. Raises ConfigError for a task that there is not or that may
    not run, and DataError for data that cannot be read.
    """
    if not settings.benchmarks:
        return ()
    with as_lm_eval_runs():
        manager = _tasks_of_folder(settings)
        if not _has_all(manager, settings):
            require_tasks(settings, prefix, manager.all_tasks)
            manager = TaskManager(include_path=manager.include_path)  # reads the thousands of lm-eval's own
        benchmarks = tracked(settings.benchmarks, "reading the data of benchmarks", "benchmarks")
        return tuple(_load(each, manager, settings, prefix, i) for i, each in enumerate(benchmarks))


def _tasks_of_folder(settings: QuestionSets) -> TaskManager:
    folder = settings.task_folder
    if folder is None:
        return TaskManager(include_defaults=False)
    path = task_folder() if is_demo(folder) else Path(folder).expanduser()
    return TaskManager(include_path=str(path), include_defaults=False)


def _has_all(manager: TaskManager, settings: QuestionSets) -> bool:
    return {each.task for each in settings.benchmarks} <= set(manager.all_tasks)


def _load(
    benchmark: Benchmark, manager: TaskManager, settings: QuestionSets, prefix: str, number: int
) -> LoadedBenchmark:
    key = f"{prefix}benchmarks.{number}"
    if settings.confirm_run_unsafe_code:
        os.environ.setdefault("HF_ALLOW_CODE_EVAL", "1")
    try:
        loaded = manager.load([benchmark.task])
    except Exception as error:  # whatever the hub, `datasets` and the task's own code raise
        raise DataError(f"{key}.task={benchmark.task}: {_unavailable(benchmark.task, manager, error)}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) and not settings.confirm_run_unsafe_code:
            raise ConfigError(
                f"{key}.task={benchmark.task}: {name} runs programs that the model writes, and lm-eval runs them "
                f"without a sandbox, as this user; write {prefix}confirm_run_unsafe_code=true where that may be, or "
                f"use a set of {prefix}sets with reward.type=code, which runs programs in one"
            )
        _configure(task, benchmark, f"{key}.shots={benchmark.shots}: {name}")
    return LoadedBenchmark(benchmark, loaded)


def _unavailable(task: str, manager: TaskManager, error: Exception) -> str:
    """Return why a task cannot be loaded, and the way out: a file that is wrong here, or data to fetch."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    file = manager.task_index[task].yaml_path
    if type(error) is FileNotFoundError or isinstance(error, TemplateError | KeyError):
        return f"it cannot be read ({reason}); correct {file}, or the files and columns that it names"
    folder = f"include_path='{manager.include_path}'" if manager.include_path else ""
    return (
        f"its data cannot be read ({reason}); where there is a network, fetch them into the cache with "
        f'`HF_HUB_OFFLINE=0 HF_DATASETS_OFFLINE=0 python -c "from lm_eval.tasks import TaskManager; '
        f"TaskManager({folder}).load(['{task}'])\"`, and copy $HF_HOME where this machine has none"
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
def as_lm_eval_runs() -> Iterator[None]:
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
