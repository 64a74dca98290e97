"""lm-eval's tasks: their names, and their data, without PyTorch. lm-eval itself is imported when it is needed."""

from __future__ import annotations

import logging
import os
import random
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import yaml
from jinja2 import TemplateError

from nemo_opd.config.evaluation import Benchmark, QuestionSets
from nemo_opd.demo import is_demo
from nemo_opd.demo.arithmetic_questions import task_folder
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.progress import tracked

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


_SEED, _NUMPY_SEED, _FEW_SHOT_SEED = 0, 1234, 1234
"""Seeds of lm-eval's `simple_evaluate`, so that tasks shuffle and draw in the same way."""
_NAME_KEY = re.compile(rb"""^["']?(?:task|group|tag)["']?[ \t]*:(.*(?:\n[ \t]*-[ \t].*)*)""", re.MULTILINE)
"""A top-level key of a file and its value, either on the same line or a list on the following lines."""
_PLAIN_NAME = re.compile(rb"\s*([\w.+-]+)\s*")
_OTHER_FILES = frozenset({".py", ".md", ".json", ".jsonl", ".txt", ".sh"})
"""Suffixes of files that define no tasks; files that tasks include have any other suffix, or none."""
_MOST_SUGGESTIONS = 5
"""Maximum number of suggestions for an unknown name."""


@dataclass(frozen=True, slots=True)
class LoadedBenchmark:
    """A benchmark with its tasks and their data."""

    settings: Benchmark
    tasks: Mapping[str, Any]
    """Result of `TaskManager.load`."""


def check_tasks(settings: QuestionSets, prefix: str) -> None:
    """Check within seconds that tasks exist, and load them if all are in `task_folder`. Raises as `load_benchmarks`."""
    manager = _folder_tasks(settings, prefix)
    require_tasks(settings, prefix, manager.all_tasks)
    if _has_all(manager, settings):
        load_benchmarks(settings, prefix)


def require_tasks(settings: QuestionSets, prefix: str, folder_tasks: Collection[str] = ()) -> None:
    """Raise ConfigError, suggesting similar names, if lm-eval does not have a task.

    prefix: prefix of the settings' keys. folder_tasks: names of the tasks in `task_folder`.
    """
    tasks = [benchmark.task for benchmark in settings.benchmarks]
    names = set(folder_tasks) if set(tasks) <= set(folder_tasks) else {*folder_tasks, *task_names()}
    for i, task in enumerate(tasks):
        if task in names:
            continue
        similar = get_close_matches(task, sorted(names), _MOST_SUGGESTIONS)
        hint = f"; similar names are {', '.join(similar)}" if similar else ""
        raise ConfigError(
            f"{prefix}benchmarks.{i}.task={task!r}: lm-eval has no such task{hint}; `lm-eval ls tasks` lists all, and "
            f"{prefix}task_folder names a folder with additional tasks"
        )


def task_names() -> set[str]:
    """Return the names of all tasks, groups and tags of lm-eval, which must be installed.

    They are read from its files, since lm-eval itself takes half a minute to list them, with a few names that the files
    only mention. A test compares them with lm-eval's own list.
    """
    folder = Path(str(files("lm_eval")), "tasks")
    paths = (path for path in folder.rglob("*") if path.suffix not in _OTHER_FILES and path.is_file())
    return {name for path in paths for name in _names_in(path.read_bytes())}


def _names_in(text: bytes) -> Iterator[str]:
    for match in _NAME_KEY.finditer(text):
        if plain := _PLAIN_NAME.fullmatch(match[1]):
            yield plain[1].decode()
            continue
        try:
            value = yaml.safe_load(match[1])
        except yaml.YAMLError:  # a line inside a text, not a top-level key
            continue
        yield from (name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str))


def load_benchmarks(settings: QuestionSets, prefix: str) -> tuple[LoadedBenchmark, ...]:
    """Load the tasks of all benchmarks, with their data.

    prefix: prefix of the settings' keys, such as `evaluation.`. Raises ConfigError if a task does not exist or may not
    run, and DataError if its data cannot be read.
    """
    if not settings.benchmarks:
        return ()
    from lm_eval.tasks import TaskManager

    with as_lm_eval_runs():
        manager = _folder_tasks(settings, prefix)
        if not _has_all(manager, settings):
            require_tasks(settings, prefix, manager.all_tasks)
            manager = TaskManager(include_path=manager.include_path)  # also reads the thousands of lm-eval's own tasks
        benchmarks = tracked(settings.benchmarks, "reading the data of benchmarks", "benchmarks")
        return tuple(_load(benchmark, manager, settings, prefix, i) for i, benchmark in enumerate(benchmarks))


def _folder_tasks(settings: QuestionSets, prefix: str) -> TaskManager:
    """Return a manager of the tasks in `task_folder` only. Raises ConfigError if its code is not confirmed."""
    from lm_eval.tasks import TaskManager

    folder = settings.task_folder
    if folder is not None and not is_demo(folder) and not settings.confirm_task_code:
        raise ConfigError(
            f"{prefix}task_folder={folder}: tasks of lm-eval are programs, as their functions and templates run "
            f"as this user; write {prefix}confirm_task_code=true if you trust the folder"
        )
    if folder is None:
        return TaskManager(include_defaults=False)
    path = task_folder() if is_demo(folder) else Path(folder).expanduser()
    return TaskManager(include_path=str(path), include_defaults=False)


def _has_all(manager: TaskManager, settings: QuestionSets) -> bool:
    return {benchmark.task for benchmark in settings.benchmarks} <= set(manager.all_tasks)


def _load(
    benchmark: Benchmark, manager: TaskManager, settings: QuestionSets, prefix: str, number: int
) -> LoadedBenchmark:
    key = f"{prefix}benchmarks.{number}"
    if settings.confirm_run_unsafe_code:
        os.environ.setdefault("HF_ALLOW_CODE_EVAL", "1")
    try:
        loaded = manager.load([benchmark.task])
    except Exception as error:  # the hub, `datasets` and the task's own code may raise anything
        raise DataError(f"{key}.task={benchmark.task}: {_unavailable(benchmark.task, manager, error)}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) and not settings.confirm_run_unsafe_code:
            raise ConfigError(
                f"{key}.task={benchmark.task}: {name} runs programs that the model writes, and lm-eval runs them "
                f"without a sandbox, as this user; write {prefix}confirm_run_unsafe_code=true if that is acceptable, "
                f"or use a set of {prefix}sets with reward.type=code, which runs programs in a sandbox"
            )
        _configure(task, benchmark, f"{key}.shots={benchmark.shots}: {name}")
    return LoadedBenchmark(benchmark, loaded)


def _unavailable(task: str, manager: TaskManager, error: Exception) -> str:
    """Return why a task cannot be loaded, with the remedy: correct a local file, or fetch data."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    file = manager.task_index[task].yaml_path
    if type(error) is FileNotFoundError or isinstance(error, TemplateError | KeyError):
        return f"it cannot be read ({reason}); correct {file}, or the files and columns that it names"
    folder = f"include_path='{manager.include_path}'" if manager.include_path else ""
    return (
        f"its data cannot be read ({reason}); on a machine with network access, fetch them into the cache with "
        f'`HF_HUB_OFFLINE=0 HF_DATASETS_OFFLINE=0 python -c "from lm_eval.tasks import TaskManager; '
        f"TaskManager({folder}).load(['{task}'])\"`, and copy its $HF_HOME if this machine has no network"
    )


def _configure(task: Any, benchmark: Benchmark, label: str) -> None:
    """Set the number of few-shot examples. Raises ConfigError, beginning with `label`, if the task fixes it at 0."""
    default = task.get_config("num_fewshot")
    if benchmark.shots and default == 0:
        raise ConfigError(f"{label} supports no examples; leave shots out")
    if benchmark.shots is not None:
        task.set_config(key="num_fewshot", value=benchmark.shots)
    elif default is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=_FEW_SHOT_SEED)


def figure_names(loaded: LoadedBenchmark) -> set[str]:
    """Return the metrics of a benchmark's tasks, without the tasks' names in front."""
    names: set[str] = set()
    for task in loaded.tasks["tasks"].values():
        filters = [entry["name"] for entry in task.get_config("filter_list") or ()] or ["none"]
        names |= {
            metric if filter_name == "none" else f"{metric}.{filter_name}"
            for metric in task.higher_is_better()
            for filter_name in filters
        }
    return names


@contextmanager
def as_lm_eval_runs() -> Iterator[None]:
    """Seed the random generators, and disable lm-eval's processes, progress bars and log; restore all afterwards.

    Errors are raised instead of logged, and the run shows its own progress.
    """
    log = logging.getLogger("lm_eval")
    level, random_state, numpy_state = log.level, random.getstate(), np.random.get_state()
    log.setLevel(logging.ERROR)
    random.seed(_SEED)
    np.random.seed(_NUMPY_SEED)
    try:
        # A process forked from this multi-threaded one may hang.
        with (
            patch.dict(os.environ, {"DISABLE_MULTIPROC": "1"}),
            patch("lm_eval.api.task.tqdm", lambda items, **_: items),
        ):
            yield
    finally:
        log.setLevel(level)
        random.setstate(random_state)
        np.random.set_state(numpy_state)
