"""Completion of `KEY=VALUE`."""

import glob
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from nemo_opd.config.options import options, recipes
from nemo_opd.config.problems import models_in


def complete_recipe(prefix: str, config_dir: Path) -> list[str]:
    """Return the names of recipes, the YAML files that begin with what is typed, and folders with a slash."""
    named = Path(prefix)
    folder, start = (named, "") if prefix.endswith("/") else (named.parent, named.name)
    found = [path for path in folder.glob(f"{glob.escape(start)}*") if path.is_dir() or path.suffix == ".yaml"]
    named_recipes = [] if "/" in prefix else recipes(config_dir)
    return sorted([*named_recipes, *(f"{path}/" if path.is_dir() else str(path) for path in found)])


def complete_setting(prefix: str, model: type[BaseModel], config_dir: Path) -> list[str]:
    """Return the settings that begin with what is typed: a part of the key at a time, then the values of a choice.

    A section that is the only one is followed by its settings, since shells end a single word with a space.
    """
    found = [each for each in _offered(prefix, model, config_dir) if each.startswith(prefix)]
    while len(found) == 1 and found[0].endswith("."):
        found = _offered(found[0], model, config_dir)
    return found


def _offered(prefix: str, model: type[BaseModel], config_dir: Path) -> list[str]:
    """Return what may stand in the place of the last part of the key, or of the value."""
    key, equals, _ = prefix.partition("=")
    *path, last = key.split(".")
    owners = [model]
    for part in path:
        if not part.isdigit():  # an element of a list
            owners = [inner for field in _fields(owners, part) for inner in models_in(field)]
    before = "".join(f"{part}." for part in path)
    if equals:
        values = [*options(config_dir, "/".join([*path, last])), *_values(_fields(owners, last))]
        return [f"{key}={value}" for value in values]
    names = dict.fromkeys(name for owner in owners for name in owner.model_fields)
    return [each for name in names for each in _continued(before, name, owners, config_dir)]


def _fields(owners: list[type[BaseModel]], name: str) -> list[Any]:
    return [owner.model_fields[name].annotation for owner in owners if name in owner.model_fields]


def _continued(before: str, name: str, owners: list[type[BaseModel]], config_dir: Path) -> Iterator[str]:
    """Yield a section with the dot that follows it, a setting or a group with `=`."""
    is_section = any(models_in(field) for field in _fields(owners, name))
    if is_section:
        yield f"{before}{name}."
    if not is_section or (not before and (config_dir / name).is_dir()):
        yield f"{before}{name}="


def _values(annotations: list[Any]) -> list[str]:
    """Return the values of a choice, of a flag, and null where a setting may be that."""
    found: dict[str, None] = {}
    remaining = list(annotations)
    while remaining:
        annotation = remaining.pop(0)
        if get_origin(annotation) is Literal:
            values = get_args(annotation)
            found |= dict.fromkeys(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
        elif annotation is bool:
            found |= {"true": None, "false": None}
        elif annotation is NoneType:
            found |= {"null": None}
        else:
            remaining += get_args(annotation)
    return list(found)
