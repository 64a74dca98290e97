"""Shell completion of nemo-opd: the verb that prints its code, and the candidates for `KEY=VALUE`."""

import glob
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.config.settings import models_in, options, recipes


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"))


def _show(arguments: Namespace, _: Console) -> None:
    import argcomplete

    print(argcomplete.shellcode(["nemo-opd"], shell=arguments.shell))


COMMAND = Command(
    "Prints the code for shell completion of nemo-opd: verbs, options, settings and their values.",
    """\
examples:
  eval "$(nemo-opd completion bash)"                      in ~/.bashrc; for zsh the same in ~/.zshrc
  nemo-opd completion fish > ~/.config/fish/completions/nemo-opd.fish
""",
    _add_arguments,
    _show,
)


def complete_recipe(prefix: str, config_dir: Path) -> list[str]:
    """Return the names of all recipes, and the YAML files and folders (with a slash) that begin with the typed text."""
    typed = Path(prefix)
    folder, start = (typed, "") if prefix.endswith("/") else (typed.parent, typed.name)
    paths = [path for path in folder.glob(f"{glob.escape(start)}*") if path.is_dir() or path.suffix == ".yaml"]
    names = [] if "/" in prefix else recipes(config_dir)
    return sorted([*names, *(f"{path}/" if path.is_dir() else str(path) for path in paths)])


def complete_setting(prefix: str, model: type[BaseModel], config_dir: Path) -> list[str]:
    """Return the settings that begin with the typed text: one part of the key at a time, then the values of a choice.

    A single matching section is completed further, since shells add a space after a single match.
    """
    matches = [text for text in _candidates(prefix, model, config_dir) if text.startswith(prefix)]
    while len(matches) == 1 and matches[0].endswith("."):
        matches = _candidates(matches[0], model, config_dir)
    return matches


def _candidates(prefix: str, model: type[BaseModel], config_dir: Path) -> list[str]:
    """Return all settings that are possible in place of the last part of the key, or of the value."""
    key, equals, _ = prefix.partition("=")
    *path, last = key.split(".")
    owners = [model]
    for part in path:
        if not part.isdigit():  # an element of a list
            owners = [inner for field in _fields(owners, part) for inner in models_in(field)]
    parent = "".join(f"{part}." for part in path)
    if equals:
        values = [*options(config_dir, "/".join([*path, last])), *_values(_fields(owners, last))]
        return [f"{key}={value}" for value in values]
    names = dict.fromkeys(name for owner in owners for name in owner.model_fields)
    return [text for name in names for text in _completed(parent, name, owners, config_dir)]


def _fields(owners: list[type[BaseModel]], name: str) -> list[Any]:
    return [owner.model_fields[name].annotation for owner in owners if name in owner.model_fields]


def _completed(parent: str, name: str, owners: list[type[BaseModel]], config_dir: Path) -> Iterator[str]:
    """Yield a section followed by a dot, or a setting or group followed by `=`."""
    is_section = any(models_in(field) for field in _fields(owners, name))
    if is_section:
        yield f"{parent}{name}."
    if not is_section or (not parent and (config_dir / name).is_dir()):
        yield f"{parent}{name}="


def _values(annotations: list[Any]) -> list[str]:
    """Return the values of a choice, true and false for a flag, and null if it is allowed."""
    names: dict[str, None] = {}
    remaining = list(annotations)
    while remaining:
        annotation = remaining.pop(0)
        if get_origin(annotation) is Literal:
            values = get_args(annotation)
            names |= dict.fromkeys(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
        elif annotation is bool:
            names |= {"true": None, "false": None}
        elif annotation is NoneType:
            names |= {"null": None}
        else:
            remaining += get_args(annotation)
    return list(names)
