"""Translation of the command line into Hydra's options and overrides, and the folders of a sweep's runs."""

import hashlib
import re
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Never

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from pydantic import BaseModel

from nemo_opd.config.other_trainers import translate
from nemo_opd.config.secrets import contains_secret, masked_leaf, without_secrets
from nemo_opd.config.settings import all_keys, is_secret_setting, keys_named, options, recipes
from nemo_opd.config.short_form import REWARDS, SOURCES, sections_of_strings, short_form
from nemo_opd.errors import ConfigError

_PLAIN_OVERRIDE = re.compile(r"^[A-Za-z_][\w.]*=")
_OVERRIDE = re.compile(r"^(~|\+{0,2}[A-Za-z_][\w./@:]*=)")
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

_YAML = (".yaml", ".yml")
_LONGEST_NAME = 120
"""Characters of the name of a run's folder in a sweep."""
_ODD_CHARACTERS = re.compile(r"[^\w.=,+-]+")
_NO_VALUE = object()
"""Placeholder for the value of an override that has no single value."""


@dataclass(frozen=True)
class CommandLine:
    """Arguments, as typed and as passed to Hydra."""

    options: Namespace
    """Options, as `add_options` defines them, `help`, `version` and `topics`: words that are not settings."""
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
        options = ["--config-path", str(self.config_file.parent), "--config-name", self.config_file.stem]
        options += ["--cfg", self.options.cfg] if self.options.cfg else []
        options += ["--resolve"] * self.options.resolve + ["--multirun"] * self.options.multirun
        return [*options, *self.settings, *self.overrides]


class _Parser(ArgumentParser):
    def error(self, message: str) -> Never:
        raise ConfigError(f"{message}; {self.prog} --help shows the options")


def add_options(parser: ArgumentParser) -> Action:
    """Define the options of a command with settings; return that of the file, which a shell completes."""
    parser.add_argument("--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    return parser.add_argument("--config", "--config-name", "-c", "-cn", metavar="FILE", nargs="?", const="")


def _read_options(arguments: Sequence[str], model: type[BaseModel]) -> tuple[Namespace, list[str]]:
    """Return the options and the words that are not options. Raises ConfigError for an unknown option."""
    parser = _Parser(Path(sys.argv[0]).name, add_help=False, allow_abbrev=False)
    add_options(parser)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("words", nargs="*")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        raise ConfigError(_explain_option(unknown[0], arguments, model, parser.prog))
    return options, options.words


def _explain_option(typed: str, arguments: Sequence[str], model: type[BaseModel], program: str) -> str:
    """Explain an unknown option, which is often a setting of this program or of another trainer."""
    flag, equals, value = typed.partition("=")
    word = flag.lstrip("-").replace("-", "_")
    following = "".join(arguments[arguments.index(typed) + 1 :][:1])
    if not equals and not following.startswith("-") and "=" not in following:
        value = following
    problem = f"{flag}: there is no such option"
    if translations := translate(word):
        return f"{problem}; {'; '.join(translations)}; settings are written key=value, without dashes"
    keys, fields = keys_named(word, model), all_keys(model)
    if not keys:
        return f"{problem}; {program} --help shows the options, and {program} --help WORD finds settings"

    def placeholder(key: str) -> str:
        if is_secret_setting(key.rpartition(".")[2]):
            return "'${oc.env:NAME}'"
        return "true" if fields[key].annotation is bool else value or "VALUE"

    settings = [f"{key}={placeholder(key)}" for key in keys]
    return f"{problem}; settings are written without dashes: {' or '.join(settings)}"


def read_command_line(
    arguments: Sequence[str], config_dir: Path, config_name: str, model: type[BaseModel]
) -> CommandLine:
    """Split the arguments into options and overrides, and translate the overrides into Hydra's grammar.

    A file or recipe, given as a word or by `--config`, sets the folder and name of the primary config; `config_dir` is
    still searched for groups. A plain `key=value` becomes `++key=value`: the YAML files hold only differences from the
    defaults, so a key missing there may still be valid, and pydantic rejects unknown keys. A value for a whole group
    becomes a new option of the group and replaces the option that the config selects. Raises ConfigError for an unknown
    option, a missing file, two files, and an override without a key.

    model: its keys are suggested for an unknown option.
    """
    options, words = _read_options(arguments, model)
    if options.config == "job" and not _names_config("job", config_dir):
        raise ConfigError("-c job: -c names a file; to print the settings, write --cfg job")
    typed = [word for word in words if _OVERRIDE.match(word)]
    options.topics = []
    for word in words:
        if word in typed:
            continue
        if word.startswith("="):
            raise ConfigError(f"{word}: the key is empty; write key=value")
        if not _names_config(word, config_dir):
            options.topics.append(word)
        elif options.config is not None:
            raise ConfigError(f"{word}: the settings come from {options.config} already; name one file")
        else:
            options.config = word
    if options.topics and not options.help:
        word = options.topics[0]
        if any((Path(word) / name).is_file() for name in ("config.json", "adapter_config.json")):
            key = "model" if "model" in model.model_fields else "student"
            raise ConfigError(f"{word}: it is a model's folder; write {key}={word}")
        if "." in word and word in all_keys(model):
            raise ConfigError(f"{word}: a setting without a value; write {word}=VALUE")
        raise ConfigError(
            f"{word}: cannot be read as key=value, and is neither a YAML file nor a recipe "
            f"({', '.join(recipes(config_dir))})"
        )
    settings = [*_QUIET_HYDRA, f"hydra.job.name='{Path(sys.argv[0]).stem}'"]
    primary = config_dir / f"{config_name}.yaml"
    if options.config is not None:
        primary = _config_file(options.config, config_dir)
        settings.append(f"hydra.searchpath=[file://{config_dir.resolve()}]")
    groups = Groups.of(config_dir, primary)
    pairs = [(argument, groups.override(argument)) for argument in typed]
    # Of a group's options the last one counts, as it does for keys; Hydra refuses to append two.
    last = {pair[1].partition("=")[0]: pair for pair in pairs}
    pairs = [pair for pair in pairs if not re.match(r"\+\w", pair[1]) or last[pair[1].partition("=")[0]] is pair]
    overrides = tuple(override for _, override in pairs)
    return CommandLine(options, tuple(settings), tuple(argument for argument, _ in pairs), overrides, primary)


def _names_config(word: str, config_dir: Path) -> bool:
    path = Path(word)
    return path.suffix in _YAML or path.is_file() or word in recipes(config_dir)


def _config_file(name: str, config_dir: Path) -> Path:
    """Return the file at this path, or the recipe with this name. Raises ConfigError if neither exists."""
    for file in (Path(name), config_dir / f"{name}.yaml"):
        if file.is_file():
            if file.suffix not in _YAML:
                raise ConfigError(f"{name}: settings are in a YAML file, such as run.yaml; write data={name} for texts")
            return file.resolve()
    raise ConfigError(
        f"--config={name}: there is no such file; give the path of a YAML file, or the name of a recipe "
        f"({', '.join(recipes(config_dir))})"
    )


def require_no_secrets(words: Sequence[str]) -> None:
    """Raise ConfigError if an override contains a secret: `ps`, Ray's dashboard and trackers show the command line."""
    for argument in words:
        for override in swept_options(argument) if is_sweep(argument) else [argument]:
            try:
                parsed = OverridesParser.create().parse_override(override)
            except HydraException:
                continue  # an option, or reported by Hydra
            key = parsed.key_or_group
            if contains_secret(parsed.value(), tuple(key.split("."))):
                raise ConfigError(
                    f"{key}: a secret on the command line can be read in `ps`, on Ray's dashboard and by trackers; "
                    "put it into an environment variable and write '${oc.env:NAME}' in its place"
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
        is_short = any(fnmatchcase(group, section) for section in (*SOURCES, *REWARDS))
        if is_short and isinstance(value := _whole_value(argument), str | list):
            # Neither can be merged into the section of the recipe.
            short: Any = value
            for name in reversed(group.split(".")):
                short = {name: short}
            section = group.partition(".")[0]
            if (long := sections_of_strings(short)) != short:
                return f"++{section}={_in_grammar(long[section])}"
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


def _in_grammar(value: Any) -> str:
    """Write nested mappings and lists of texts in Hydra's grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_in_grammar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_in_grammar, value)) + "]"
    return "null" if value is None else quoted(str(value))


def quoted(text: str) -> str:
    """Quote a text as a value in Hydra's grammar, whatever characters it contains."""
    return QuotedString(text, Quote.single).with_quotes()
