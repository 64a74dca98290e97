"""Names of lm-eval's tasks, read from its files because lm-eval itself takes half a minute to list them."""

import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

import yaml

from nemo_opd.config.evaluation import QuestionSets
from nemo_opd.errors import ConfigError

_KEY = re.compile(rb"""^["']?(?:task|group|tag)["']?[ \t]*:(.*(?:\n[ \t]*-[ \t].*)*)""", re.MULTILINE)
"""A top-level key of a file and its value, either on the same line or a list on the following lines."""
_PLAIN = re.compile(rb"\s*([\w.+-]+)\s*")
_OTHER_FILES = frozenset({".py", ".md", ".json", ".jsonl", ".txt", ".sh"})
"""Suffixes of files that define no tasks; files that tasks include have any other suffix, or none."""
_NUM_NAMES = 5
"""Maximum number of suggestions for an unknown name."""


def task_names() -> set[str]:
    """Return the names of all tasks, groups and tags of lm-eval, which must be installed.

    They include a few names that its files only mention. A test compares them with lm-eval's own list.
    """
    folder = Path(str(files("lm_eval")), "tasks")
    paths = (path for path in folder.rglob("*") if path.suffix not in _OTHER_FILES and path.is_file())
    return {name for path in paths for name in _names_in(path.read_bytes())}


def _names_in(text: bytes) -> Iterator[str]:
    for match in _KEY.finditer(text):
        if plain := _PLAIN.fullmatch(match[1]):
            yield plain[1].decode()
            continue
        try:
            value = yaml.safe_load(match[1])
        except yaml.YAMLError:  # a line inside a text, not a top-level key
            continue
        yield from (name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str))


def require_tasks(settings: QuestionSets, prefix: str, folder_tasks: Collection[str] = ()) -> None:
    """Raise ConfigError, suggesting similar names, if lm-eval does not have a task.

    prefix: prefix of the settings' keys. folder_tasks: names of the tasks in `task_folder`.
    """
    tasks = [benchmark.task for benchmark in settings.benchmarks]
    names = set(folder_tasks) if set(tasks) <= set(folder_tasks) else {*folder_tasks, *task_names()}
    for i, task in enumerate(tasks):
        if task in names:
            continue
        similar = get_close_matches(task, sorted(names), _NUM_NAMES)
        hint = f"; similar names are {', '.join(similar)}" if similar else ""
        raise ConfigError(
            f"{prefix}benchmarks.{i}.task={task!r}: lm-eval has no such task{hint}; `lm-eval ls tasks` lists all, and "
            f"{prefix}task_folder names a folder with additional tasks"
        )
