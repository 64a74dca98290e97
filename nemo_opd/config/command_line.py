"""The command line as Hydra needs it: options, then overrides."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from nemo_opd.config.options import recipes
from nemo_opd.errors import ConfigError

_PLAIN_OVERRIDE = re.compile(r"^[A-Za-z_][\w.]*=")
_OVERRIDE = re.compile(r"^(~|\+{0,2}[A-Za-z_][\w./@:]*=)")
HELP_FLAGS = frozenset({"--help", "-h"})
MULTIRUN_FLAGS = frozenset({"--multirun", "-m"})
INLINE = "_inline_"
"""Begins the name of an option that the command line itself gives a group."""

# A run owns one directory, run.output_dir; Hydra adds no folders or log files.
_QUIET_HYDRA = (
    "hydra.run.dir=.",
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


@dataclass(frozen=True)
class CommandLine:
    """Arguments, as typed and as Hydra reads them."""

    options: tuple[str, ...]
    settings: tuple[str, ...]
    """Overrides that no one typed."""
    typed: tuple[str, ...]
    """Overrides as they were written."""
    overrides: tuple[str, ...]
    """The same as Hydra reads them."""
    config_file: Path
    """The primary config."""

    @property
    def for_hydra(self) -> list[str]:
        return [*self.options, *self.settings, *self.overrides]


def read_command_line(arguments: Sequence[str], config_dir: Path, config_name: str) -> CommandLine:
    """Sort the arguments and make overrides of Hydra's grammar of them.

    `--config FILE` becomes the folder and the name of the primary config, with `config_dir` still searched for groups.
    A plain `key=value` becomes `++key=value`: the YAML files name only what differs from the defaults, so a key's
    absence there says nothing, and pydantic is what refuses unknown keys. The value of a whole group becomes an option
    of the group, which takes the place of the one that the config names. Raises ConfigError for a `--config` without a
    file and an override without a key.
    """
    options: list[str] = []
    settings = [*_QUIET_HYDRA, f"hydra.job.name='{Path(sys.argv[0]).stem}'"]
    typed: list[str] = []
    primary = config_dir / f"{config_name}.yaml"
    remaining = iter(arguments)
    for argument in remaining:
        flag, _, value = argument.partition("=")
        if flag == "--config":
            primary = config_file(value or next(remaining, ""), config_dir)
            options += ["--config-path", str(primary.parent), "--config-name", primary.stem]
            settings.append(f"hydra.searchpath=[file://{config_dir.resolve()}]")
        elif _OVERRIDE.match(argument):
            typed.append(argument)
        elif argument.startswith("="):
            raise ConfigError(f"{argument}: the key is empty; write key=value")
        else:
            options.append(argument)
    groups = Groups.of(config_dir, primary)
    overrides = tuple(groups.override(argument) for argument in typed)
    return CommandLine(tuple(options), tuple(settings), tuple(typed), overrides, primary)


def quoted(text: str) -> str:
    """Return a value of Hydra's grammar that stands for the text, whatever characters it has."""
    return QuotedString(text, Quote.single).with_quotes()


def config_file(name: str, config_dir: Path) -> Path:
    """Return the file of that path, or the recipe of that name. Raises ConfigError where there is neither."""
    for file in (Path(name), config_dir / f"{name}.yaml"):
        if file.is_file():
            return file.resolve()
    raise ConfigError(
        f"--config={name}: there is no such file; give the path of a YAML file, or the name of a recipe "
        f"({', '.join(recipes(config_dir))})"
    )


@dataclass(frozen=True)
class Groups:
    """Config groups, and the choices of the primary config."""

    config_dir: Path
    listed: frozenset[str]
    """Groups in its defaults, and in those of configs that it builds on."""
    keys: frozenset[str]
    """Keys that these set."""

    @classmethod
    def of(cls, config_dir: Path, primary: Path) -> "Groups":
        contents = list(_built_on(primary, config_dir))
        entries = [entry for content in contents for entry in content.get("defaults") or [] if isinstance(entry, dict)]
        listed = [str(key).removeprefix("override ").lstrip("/") for entry in entries for key in entry]
        return cls(config_dir, frozenset(listed), frozenset(str(key) for content in contents for key in content))

    def override(self, argument: str) -> str:
        """Return the argument as Hydra needs it."""
        key = argument.partition("=")[0]
        group = key.lstrip("+")
        if group.startswith("hydra") or not (self.config_dir / group.replace(".", "/")).is_dir():
            return f"++{argument}" if _PLAIN_OVERRIDE.match(argument) else argument
        value = _whole_value(argument)
        if not isinstance(value, str) and value is not _NO_VALUE:
            return f"{'' if group in self.listed else '+'}{group}={_inline_option(group, value)}"
        plain = argument.lstrip("+") if key.startswith("++") else argument
        is_new = group not in self.listed and group not in self.keys
        return f"+{plain}" if is_new and not plain.startswith("+") else plain


def _built_on(primary: Path, config_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the settings of a config and of the configs, not options of groups, that its defaults name, and theirs.

    As for Hydra, a config in the primary's folder comes before one with the same name in `config_dir`.
    """
    files = [primary]
    for file in files:
        yield (content := _top_level(file))
        names = [entry.lstrip("/") for entry in content.get("defaults") or [] if isinstance(entry, str)]
        for name in names:
            places = (folder / f"{name}.yaml" for folder in (primary.parent, config_dir))
            base = next(filter(Path.is_file, places), primary)
            files += [base] if base not in files else []


def _top_level(primary: Path) -> dict[str, Any]:
    """Return the file's settings; nothing where it cannot be read, which Hydra reports."""
    try:
        content = yaml.safe_load(primary.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


_NO_VALUE = object()


def _whole_value(argument: str) -> object:
    """Return the value of an override; _NO_VALUE where it is malformed or a sweep, which Hydra deals with."""
    try:
        override = OverridesParser.create().parse_override(argument)
        return _NO_VALUE if override.is_sweep_override() else override.value()
    except HydraException:
        return _NO_VALUE


def _inline_option(group: str, value: object) -> str:
    """Store a value as an option of the group and return the option's name."""
    store = ConfigStore.instance()
    name = f"{INLINE}{len(store.list(group)) if group in store.repo else 0}"
    store.store(name=name, group=group, node={group: value}, package="_global_")
    return name
