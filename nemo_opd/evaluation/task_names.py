"""Names of lm-eval's tasks, from the texts of its files: lm-eval itself takes half a minute to say them."""

import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

import yaml

from nemo_opd.config.evaluation import QuestionSets
from nemo_opd.errors import ConfigError

_KEY = re.compile(rb"""^["']?(?:task|group|tag)["']?[ \t]*:(.*(?:\n[ \t]*-[ \t].*)*)""", re.MULTILINE)
"""A key of the file's top level, and its value: on the line, or a list on the lines below."""
_PLAIN = re.compile(rb"\s*([\w.+-]+)\s*")
_OTHER_FILES = frozenset({".py", ".md", ".json", ".jsonl", ".txt", ".sh"})
"""Endings of files that no task is made of; what tasks include has any other, or none."""
_NUM_NAMES = 5
"""Names that are suggested for an unknown one."""


def task_names() -> set[str]:
    """Return the names of the tasks, groups and tags that come with lm-eval, which must be installed.

    A test compares them with lm-eval's own list; a few that its files only mention are there too.
    """
    folder = Path(str(files("lm_eval")), "tasks")
    found = (file for file in folder.rglob("*") if file.suffix not in _OTHER_FILES and file.is_file())
    return {name for file in found for name in _names_in(file.read_bytes())}


def _names_in(text: bytes) -> Iterator[str]:
    for found in _KEY.finditer(text):
        if plain := _PLAIN.fullmatch(found[1]):
            yield plain[1].decode()
            continue
        try:
            value = yaml.safe_load(found[1])
        except yaml.YAMLError:  # not the top level of YAML, but a line within a text
            continue
        yield from (name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str))


def require_tasks(settings: QuestionSets, prefix: str, own: Collection[str] = ()) -> None:
    """Raise ConfigError, with the nearest names, for a task that lm-eval does not have.

    prefix: of the settings' keys. own: names of tasks in `task_folder`.
    """
    tasks = [each.task for each in settings.benchmarks]
    known = set(own) if set(tasks) <= set(own) else {*own, *task_names()}
    for i, task in enumerate(tasks):
        if task in known:
            continue
        near = get_close_matches(task, sorted(known), _NUM_NAMES)
        hint = f"; near names are {', '.join(near)}" if near else ""
        raise ConfigError(
            f"{prefix}benchmarks.{i}.task={task!r}: lm-eval has no such task{hint}; `lm-eval ls tasks` lists all, and "
            f"{prefix}task_folder names a folder with further ones"
        )
