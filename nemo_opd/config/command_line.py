"""Translation of the command line into Hydra's options and overrides, and the folders of a sweep's runs."""

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from nemo_opd.config.base import options, recipes
from nemo_opd.config.secrets import masked_leaf, without_secrets
from nemo_opd.config.short_form import sections_of_strings, short_form
from nemo_opd.errors import ConfigError

_PLAIN_OVERRIDE = re.compile(r"^[A-Za-z_][\w.]*=")
_OVERRIDE = re.compile(r"^(~|\+{0,2}[A-Za-z_][\w./@:]*=)")
HELP_FLAGS = frozenset({"--help", "-h"})
MULTIRUN_FLAGS = frozenset({"--multirun", "-m"})
INLINE = "_inline_"
"""Prefix of the names of group options that are defined on the command line."""

# A run owns one directory, run.output_dir; Hydra adds no folders or log files.
_QUIET_HYDRA = (
    "hydra.run.dir=.",
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)

_LONGEST_NAME = 120
"""Characters of the name of a run's folder in a sweep."""
_ODD_CHARACTERS = re.compile(r"[^\w.=,+-]+")
_NO_VALUE = object()
"""Placeholder for the value of an override that has no single value."""


@dataclass(frozen=True)
class CommandLine:
    """Arguments, as typed and as passed to Hydra."""

    options: tuple[str, ...]
    settings: tuple[str, ...]
    """Overrides added by this program."""
    typed: tuple[str, ...]
    """Overrides as typed."""
    overrides: tuple[str, ...]
    """The same overrides in Hydra's grammar."""
    config_file: Path
    """The primary config."""

    @property
    def for_hydra(self) -> list[str]:
        return [*self.options, *self.settings, *self.overrides]


def read_command_line(arguments: Sequence[str], config_dir: Path, config_name: str) -> CommandLine:
    """Split the arguments into options and overrides, and translate the overrides into Hydra's grammar.

    `--config FILE` sets the folder and name of the primary config; `config_dir` is still searched for groups. A plain
    `key=value` becomes `++key=value`: the YAML files hold only differences from the defaults, so a key missing there
    may still be valid, and pydantic rejects unknown keys. A value for a whole group becomes a new option of the group
    and replaces the option that the config selects. Raises ConfigError for a `--config` without a file and for an
    override without a key.
    """
    options: list[str] = []
    settings = [*_QUIET_HYDRA, f"hydra.job.name='{Path(sys.argv[0]).stem}'"]
    typed: list[str] = []
    primary = config_dir / f"{config_name}.yaml"
    remaining = iter(arguments)
    for argument in remaining:
        flag, _, value = argument.partition("=")
        if flag == "--config":
            primary = _config_file(value or next(remaining, ""), config_dir)
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


def _config_file(name: str, config_dir: Path) -> Path:
    """Return the file at this path, or the recipe with this name. Raises ConfigError if neither exists."""
    for file in (Path(name), config_dir / f"{name}.yaml"):
        if file.is_file():
            return file.resolve()
    raise ConfigError(
        f"--config={name}: there is no such file; give the path of a YAML file, or the name of a recipe "
        f"({', '.join(recipes(config_dir))})"
    )


@dataclass
class Sweep:
    """The runs of one command line, in order."""

    keys: tuple[str, ...]
    """Keys that vary."""
    root: Path | None = None
    """Folder of the sweep; set when the first run is placed."""
    names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, typed: Sequence[str]) -> "Sweep":
        """Find the keys that vary.

        typed: the command line's overrides.
        """
        return cls(tuple(argument.lstrip("+").partition("=")[0] for argument in typed if is_sweep(argument)))

    def place(self, data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
        """Return the next run's settings, with the folder that it writes to.

        data: the composed settings. overrides: this run's overrides. The sweep's folder is `run.output_dir` (or
        `output_dir`, for a command without `run`) if set, otherwise `outputs/NAME/sweep_TIME`.
        """
        run: Mapping[str, Any] = data.get("run", data)
        if self.root is None:
            stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
            folder, name = run.get("output_dir"), run.get("name", "evaluation")
            self.root = Path(folder) if folder else Path("outputs") / str(name) / f"sweep_{stamp}"
        placed = {**run, "output_dir": str(self.root / self._next_name(overrides))}
        return {**data, "run": placed} if "run" in data else placed

    def _next_name(self, overrides: Sequence[str]) -> str:
        """Return a name made of the values that vary, with a number if it is taken."""
        pairs = (override.lstrip("+").partition("=") for override in overrides)
        varied = ",".join(f"{key}={_masked(key, value)}" for key, _, value in pairs if key in self.keys)
        name = _ODD_CHARACTERS.sub("_", varied).strip("_") or "run"
        if len(name) > _LONGEST_NAME:
            name = f"{name[: _LONGEST_NAME - 9]}_{hashlib.sha256(varied.encode()).hexdigest()[:8]}"
        if name in self.names:
            name = f"{name}_{len(self.names)}"
        self.names.append(name)
        return name


def _masked(key: str, value: str) -> str:
    """Return an override's value without secrets."""
    return without_secrets(masked_leaf({}, tuple(key.split(".")), value))


def is_sweep(argument: str) -> bool:
    """Return whether an override has several values, one for each run."""
    try:
        return OverridesParser.create().parse_override(argument).is_sweep_override()
    except HydraException:
        return False


def swept_options(override: str) -> list[str]:
    """Return an override for each value of a sweep over a group."""
    sweep = OverridesParser.create().parse_override(override)
    return [f"{override.partition('=')[0]}={value}" for value in sweep.sweep_string_iterator()]


@dataclass(frozen=True)
class Groups:
    """Config groups, and the groups that the primary config lists."""

    config_dir: Path
    listed: frozenset[str]
    """Groups in the defaults of the primary config and of the configs it builds on."""

    @classmethod
    def of(cls, config_dir: Path, primary: Path) -> "Groups":
        contents = list(_built_on(primary, config_dir))
        entries = [entry for content in contents for entry in content.get("defaults") or [] if isinstance(entry, dict)]
        listed = [str(key).removeprefix("override ").lstrip("/") for entry in entries for key in entry]
        return cls(config_dir, frozenset(listed))

    def override(self, argument: str) -> str:
        """Return the argument in Hydra's grammar."""
        key = argument.partition("=")[0]
        group = key.lstrip("+")
        if group.startswith("hydra") or not (self.config_dir / group.replace(".", "/")).is_dir():
            return f"++{argument}" if _PLAIN_OVERRIDE.match(argument) else argument
        value = _whole_value(argument)
        if isinstance(value, str) and value not in options(self.config_dir, group):
            value = short_form(group, value)
        if not isinstance(value, str) and value is not _NO_VALUE:
            return f"{'' if group in self.listed else '+'}{group}={_inline_option(group, value)}"
        plain = argument.lstrip("+") if key.startswith("++") else argument
        return f"+{plain}" if group not in self.listed and not plain.startswith("+") else plain


def _built_on(primary: Path, config_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the settings of a config and, recursively, of the configs that its defaults name; options of groups
    excluded.

    As in Hydra, a config in the primary's folder takes precedence over one with the same name in `config_dir`.
    """
    files = [primary]
    for file in files:
        yield (content := _top_level(file))
        names = [entry.lstrip("/") for entry in content.get("defaults") or [] if isinstance(entry, str)]
        for name in names:
            places = (folder / f"{name}.yaml" for folder in (primary.parent, config_dir))
            base = next(filter(Path.is_file, places), primary)
            files += [base] if base not in files else []


def _top_level(file: Path) -> dict[str, Any]:
    """Return the file's settings; an empty dict if it cannot be read, which Hydra reports."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _whole_value(argument: str) -> object:
    """Return the value of an override; _NO_VALUE if it is malformed or a sweep, which Hydra handles."""
    try:
        override = OverridesParser.create().parse_override(argument)
        return _NO_VALUE if override.is_sweep_override() else override.value()
    except HydraException:
        return _NO_VALUE


def _inline_option(group: str, value: object) -> str:
    """Store a value as an option of the group and return the option's name."""
    store = ConfigStore.instance()
    name = f"{INLINE}{len(store.list(group)) if group in store.repo else 0}"
    store.store(name=name, group=group, node=sections_of_strings({group: value}), package="_global_")
    return name


def quoted(text: str) -> str:
    """Quote a text as a value in Hydra's grammar, whatever characters it contains."""
    return QuotedString(text, Quote.single).with_quotes()
