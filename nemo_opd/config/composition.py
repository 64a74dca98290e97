"""Loading of settings: Hydra composes, pydantic validates."""

import os
import pydoc
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import hydra
import yaml
from hydra import initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError

from nemo_opd.config.command_line import (
    INLINE,
    CommandLine,
    Sweep,
    is_sweep,
    quoted,
    read_command_line,
    require_no_secrets,
    swept_options,
)
from nemo_opd.config.other_trainers import translate
from nemo_opd.config.reference import help_text
from nemo_opd.config.run import RunConfig, S, from_dict, validated
from nemo_opd.config.secrets import has_references, leaves, remember, require_values, shown_config
from nemo_opd.config.settings import Settings
from nemo_opd.config.short_form import TYPED, is_text, sections_of_strings
from nemo_opd.errors import ConfigError
from nemo_opd.files import load_yaml, read_file
from nemo_opd.paths import configs_dir, package_version
from nemo_opd.progress import separately

Prepare = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Completes composed settings before they are validated."""


_OTHER_KEY = re.compile(r"\$\{(?!oc\.env:)([^}]*)\}?")
"""A reference to another key."""
_MODEL = ", or the folder or the hub's name of a model"
_INSTEAD_OF_OPTION = {
    "student": _MODEL,
    "teachers": _MODEL,
    "data": ", or a file, such as texts.jsonl",
    "reward": "; for a function of your own, write reward=function reward.function=MODULE:NAME",
}
_LONGEST_REFERRED_TO = 1 << 20
"""Characters of all values that a file refers to."""


def _unchanged(data: Mapping[str, Any]) -> Mapping[str, Any]:
    return data


def compose(recipe: str | Path, overrides: Sequence[str] = (), prepare: Prepare = _unchanged) -> RunConfig:
    """Return the settings of a recipe, named by file or name, with overrides as on the command line.

    Raises ConfigError if they cannot be composed or are not valid.
    """
    arguments = ["--config", str(recipe), *overrides]
    return compose_settings(arguments, RunConfig, configs_dir(), "off_policy_demo", prepare)


def compose_settings(
    arguments: Sequence[str], model: type[S], config_dir: Path, config_name: str, prepare: Prepare = _unchanged
) -> S:
    """Return a command line's settings through Hydra's compose API, which takes half the time."""
    command = read_command_line(arguments, config_dir, config_name, model)
    file = command.config_file

    def read(composed: DictConfig) -> S:
        return validated(prepare(_plain_data(composed)), model)

    with composition_errors(command, read):
        require_no_hydra_settings(command, config_dir, config_name)
        with initialize_config_dir(str(file.parent), version_base="1.3"):
            composed = hydra.compose(file.stem, [*command.settings, *command.overrides])
    return read(composed)


def require_no_hydra_settings(command: CommandLine, config_dir: Path, config_name: str) -> None:
    """Raise ConfigError if a file outside of `config_dir` changes settings of Hydra, as they name code that Hydra runs.

    Settings of Hydra that are typed on the command line are the user's own.
    """
    file = command.config_file
    if file.parent == config_dir.resolve():
        return
    overrides = [override for override in command.overrides if not override.lstrip("+~").startswith("hydra")]
    swept = [override for override in overrides if is_sweep(override)]
    fixed = [override for override in overrides if override not in swept]
    expected = _hydra_settings(config_dir / f"{config_name}.yaml", command.settings, ())
    # Only an option of a group can bring settings of Hydra with it.
    options = (option for override in swept if not override.startswith("++") for option in swept_options(override))
    for more in ((), *((option,) for option in options)):
        settings = _hydra_settings(file, command.settings, (*fixed, *more))
        if changed := [key for key, value in settings.items() if value != expected.get(key)]:
            raise ConfigError(
                f"{file}: it sets hydra.{changed[0]}; settings of Hydra can name code that it runs, so they are taken "
                f"from the command line only; remove the section from the file, or from the files that it names"
            )


def _hydra_settings(file: Path, settings: Sequence[str], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the composed settings of Hydra, without those that describe this composition."""
    with initialize_config_dir(str(file.parent.resolve()), version_base="1.3"):
        composed = hydra.compose(file.stem, [*settings, *overrides], return_hydra_config=True)
    node: Any = OmegaConf.to_container(composed.hydra, resolve=False)
    job = {key: value for key, value in node["job"].items() if key not in ("config_name", "override_dirname")}
    added = {key: [item for item in node["overrides"][key] if item not in overrides] for key in ("hydra", "task")}
    return {key: value for key, value in node.items() if key != "runtime"} | {"job": job, "overrides": added}


def from_yaml(path: Path, *, follow_link: bool = False) -> RunConfig:
    """Read a run's config.yaml; masked secrets stay masked. Raises ConfigError, YAMLError and OSError."""
    written = load_yaml(read_file(path, follow_link=follow_link).decode())
    if not isinstance(written, dict):
        raise ConfigError(f"{path}: it has no keys; restore it")
    if not has_references(written):
        return from_dict(written)
    _require_bounded_references(written, path)
    try:
        data: Any = OmegaConf.to_container(OmegaConf.create(written), resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path}: {_reference_problem(error)}") from error
    remember(written, data)
    return from_dict(data)


def _require_bounded_references(settings: Any, path: Path) -> None:
    """Raise ConfigError for references that may stand for billions of characters: to sections, or in many steps."""
    values = {".".join(map(str, keys)): value for keys, value in leaves(settings)}
    length = 0
    for key, value in values.items():
        for name in _OTHER_KEY.findall(value) if isinstance(value, str) else ():
            target = values.get(name)
            is_plain = name in values and not _OTHER_KEY.search(str(target))
            length += len(str(target))
            if not (is_plain or (name in values and value == f"${{{name}}}")) or length > _LONGEST_REFERRED_TO:
                raise ConfigError(f"{path}: {key}={value}: such references are not read here; write the value itself")


def to_yaml(config: Settings) -> str:
    """Return YAML that suffices to repeat the run, except for secrets.

    References to the environment are kept; other secrets are masked.
    """
    return yaml.safe_dump(shown_config(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True)


def run_with_hydra(
    task: Callable[[S], None],
    model: type[S],
    *,
    config_dir: Path,
    config_name: str,
    prepare: Prepare = _unchanged,
    after_sweep: Callable[[Path, Sequence[str]], None] = lambda root, names: None,
    is_interrupted: Callable[[], bool] = lambda: False,
    before_default: Callable[[str], None] = lambda name: None,
) -> None:
    """Compose `config_dir/config_name` with the command line's overrides, validate it as `model`, and call `task`.

    `before_default` is called with the recipe's name if the command line names no file or recipe. Errors of `task` are
    raised here; for a `--multirun`, the first error, after all jobs have run and `after_sweep` was called with the
    sweep's folder and the names of its runs. No further job starts once `is_interrupted` returns true;
    KeyboardInterrupt names those that did not start.
    """
    failures: list[Exception] = []
    not_started: list[str] = []
    command = read_command_line(sys.argv[1:], config_dir, config_name, model)
    require_no_secrets(sys.argv[1:])
    sweep = Sweep.of(command.typed)

    def guarded(cfg: DictConfig) -> None:
        # Hydra turns an exception that passes through it into a trimmed traceback and exit status 1.
        try:
            hydra_settings = HydraConfig.get()
            data = _plain_data(cfg)
            if hydra_settings.mode == RunMode.MULTIRUN:
                data = sweep.place(data, hydra_settings.overrides.task)
                if is_interrupted():
                    not_started.append(sweep.names[-1])
                    return
            with separately():
                task(validated(prepare(data), model))
        except Exception as error:
            failures.append(error)

    def check(composed: DictConfig) -> None:
        validated(prepare(_plain_data(composed)), model)

    program, sys.argv[1:] = Path(sys.argv[0]).name, command.for_hydra
    with ExitStack() as stack:
        stack.enter_context(composition_errors(command, check))
        if command.options.help:
            with suppress(BrokenPipeError):
                _show(help_text(model, config_dir, program, command.options.topics))
            return
        if command.options.version:
            print(package_version())
            return
        if command.options.multirun:
            # Hydra writes a sweep's overrides into a file that nobody needs.
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            sys.argv.append(f"hydra.sweep.dir={quoted(scratch)}")
        require_no_hydra_settings(command, config_dir, config_name)
        if command.options.config is None and not command.options.cfg:
            before_default(config_name)
        hydra.main(version_base="1.3", config_path=str(config_dir), config_name=config_name)(guarded)()
    end: BaseException | None = failures[0] if failures else KeyboardInterrupt() if not_started else None
    if end is not None and not_started:
        end.add_note(f"these runs of the sweep were not started: {', '.join(not_started)}")
    try:
        if sweep.root is not None:
            after_sweep(sweep.root, sweep.names)
    finally:
        if end is not None:
            raise end


def _show(text: str) -> None:
    """Print a text, page by page if it does not fit a terminal."""
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        pydoc.pager(text)
    else:
        print(text, flush=True)


def from_omegaconf(cfg: DictConfig, model: type[S]) -> S:
    return validated(_plain_data(cfg), model)


def _plain_data(cfg: DictConfig) -> dict[str, Any]:
    """Return a composed configuration as plain data. Raises ConfigError for a reference that cannot be resolved."""
    try:
        data = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        remember(OmegaConf.to_container(cfg, resolve=False), data)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: required, but not given; write {error.full_key}=VALUE") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'the config'}: {_reference_problem(error)}") from error
    assert isinstance(data, dict)
    require_values(data)
    return {str(key): value for key, value in data.items()}


def _reference_problem(error: Exception) -> str:
    """Return why a reference cannot be resolved, such as that an environment variable is not set, and the way out."""
    reason = str(getattr(error, "msg", None) or error).splitlines()[0]
    return f"{reason.partition('interpolation: ')[2] or reason}; correct the reference, or set the variable"


@contextmanager
def composition_errors(command: CommandLine, check: Callable[[DictConfig], object]) -> Iterator[None]:
    """Turn Hydra's and OmegaConf's errors in the block into ConfigError; Hydra's own report has no clear last line.

    check: validates what composes without options that do not exist, so that all problems are told at once.
    """
    previous = os.environ.get("HYDRA_FULL_ERROR")
    read_short_forms(command.overrides)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of exiting
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError("\n".join(_explain_all(error, command, check))) from error
    finally:
        if previous is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = previous


def _explain_all(error: Exception, command: CommandLine, check: Callable[[DictConfig], object]) -> Iterator[str]:
    """Yield the reason of an error; for an option that a group lacks, also all problems outside of the group."""
    left_out = []
    while (group := _group_without_option(error, command)) is not None:
        yield _explain_composition(error, command)
        left_out.append(group)
        command = _without_group(command, group)
        try:
            check(_recomposed(command, command.overrides))
        except ConfigError as problem:
            lines = str(problem).splitlines()
            yield from (line for line in lines if re.split("[.=:]", line)[0] not in left_out)
            return
        except Exception as next_error:
            error = next_error
        else:
            return
    yield _explain_composition(error, command)


def _group_without_option(error: Exception, command: CommandLine) -> str | None:
    """Return the group of an override that names an option that the group lacks, if that is the error."""
    if not isinstance(error, MissingConfigException) or not error.options:
        return None
    group, _, name = str(error.missing_cfg_file).partition("/")
    return group if f"{group}={name}" in (override.lstrip("+") for override in command.overrides) else None


def _without_group(command: CommandLine, group: str) -> CommandLine:
    """Leave out a group's option, and overrides of its keys, which may exist with the intended option only."""
    pairs = zip(command.typed, command.overrides, strict=True)
    others = [pair for pair in pairs if re.split("[.=]", pair[1].lstrip("+~"))[0] != group]
    typed, overrides = zip(*others, strict=True) if others else ((), ())
    return replace(command, typed=typed, overrides=overrides)


def _explain_composition(error: Exception, command: CommandLine) -> str:
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark or error.context_mark):
        return (
            f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: invalid YAML: "
            f"{error.problem or error.context}; correct the file"
        )
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        return f"stdout cannot be written ({os.strerror(error.errno)}); send the output elsewhere, or make room"
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).partition("/")
        options = ", ".join(option for option in error.options if not option.startswith(INLINE))
        if not name:
            return f"{group}=: it is empty; choose one of {options}"
        ways_out = [*translate(name), f"choose one of {options}{_INSTEAD_OF_OPTION.get(group, '')}"]
        return f"{group}={name}: there is no such option; {'; '.join(ways_out)}"
    if isinstance(error, OverrideParseException):
        override = error.override.removeprefix("++")
        return f"{override}: cannot be read as key=value; quote a value with special characters, as in 'key=\"a(b\"'"
    if isinstance(error, MissingConfigException):
        return f"{str(error).splitlines()[0].rstrip('.')}; the files are in {command.config_file.parent}"
    wrong, base = _first_failing(command)
    if (
        wrong is not None
        and base is not None
        and (reason := _explain_list_key(wrong, base) or _explain_kind(wrong, base))
    ):
        return f"{wrong}: {reason}"
    if wrong is not None and "--multirun" in str(error):
        return f"{wrong}: several values; write key=[a,b] for a list, or add --multirun for a run with each value"
    lines = [line.strip().rstrip(".") for line in str(error.__cause__ or error).splitlines() if line.strip()]
    reason = "; ".join(lines[:2]).replace("++", "") or type(error).__name__
    if wrong is not None and wrong.startswith("~") and "defaults list" in reason:
        return f"{wrong}: the file sets this section itself; write {wrong.removeprefix('~')}=null"
    if wrong is None:
        return f"{command.config_file}: the configuration cannot be composed ({reason}); correct the file"
    return f"{wrong}: cannot be applied ({reason}); correct it, or leave it out"


def _first_failing(command: CommandLine) -> tuple[str | None, DictConfig | None]:
    """Return the first override, as typed, that makes composing fail, and the configuration without it.

    The override is None if composing fails without any; all overrides as one text if composing succeeds here.
    """
    base = None
    # Hydra's order: group options first, wherever they are on the line
    ordered = sorted(zip(command.typed, command.overrides, strict=True), key=lambda pair: pair[1].startswith("++"))
    for number in range(len(ordered) + 1):
        try:
            composed = _recomposed(command, [override for _, override in ordered[:number]])
        except Exception:
            return (ordered[number - 1][0] if number else None), base
        base = composed
    return (" ".join(command.typed) or None), None


def _recomposed(command: CommandLine, overrides: Sequence[str]) -> DictConfig:
    file = command.config_file
    searched = [setting for setting in command.settings if setting.startswith("hydra.searchpath")]
    with hydra.initialize_config_dir(str(file.parent), version_base="1.3"):
        return hydra.compose(file.stem, [*searched, *overrides])


def _explain_list_key(override: str, config: DictConfig) -> str | None:
    """Explain a wrong index into a list, or the removal of one element. Returns None for other overrides."""
    key = override.lstrip("~+").partition("=")[0]
    *path, _ = parts = key.split(".")
    for depth in range(1, len(path) + 1):
        name, index = ".".join(parts[:depth]), parts[depth]
        value = OmegaConf.select(config, name)
        if not isinstance(value, ListConfig):
            continue
        if index.isdigit() and int(index) < len(value):
            if override.startswith("~") and depth == len(path):
                return f"one element of a list cannot be removed; write the remaining ones as {name}=[…]"
            continue
        if not len(value):
            return f"{name} is an empty list; write {name}=[…]"
        *leading, last = (f"{name}.{i}" for i in range(len(value)))
        elements = f"{', '.join(leading)} and {last}" if leading else last
        return f"{name} is a list of {len(value)}, {elements}; write one of these, or the whole list as {name}=[…]"
    return None


def _explain_kind(override: str, config: DictConfig) -> str | None:
    """Explain a list in place of a section, or a section in place of a list. Returns None for other overrides."""
    key, _, value = override.lstrip("+").partition("=")
    section = OmegaConf.select(config, key)
    if isinstance(section, DictConfig) and value.startswith("["):
        return f"a group of keys, not a list; set {key}.KEY of {', '.join(map(str, section))}"
    if isinstance(section, ListConfig) and value.startswith("{"):
        return f"a list, whose elements are groups of keys; write {key}=[{value}]"
    return None


def read_short_forms(overrides: Sequence[str]) -> None:
    """Let Hydra compose files with short forms, so that overrides such as `data.shuffle=false` find a section.

    overrides: an override of a whole section, such as `loss=p_kl`, replaces a string of the files.
    """
    Plugins.instance()  # registers Hydra's own class first
    SourcesRegistry.instance().types["file"] = _Source
    _Source.replaced = {override.lstrip("+").partition("=")[0] for override in overrides} & {*TYPED}


class _Source(FileConfigSource):
    """Files of settings, with strings at the top of a file turned into sections."""

    replaced: ClassVar[set[str]] = set()
    """Sections whose strings are left out."""

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        if isinstance(result.config, DictConfig):
            content: Any = OmegaConf.to_container(result.config, resolve=False)
            kept = {key: value for key, value in content.items() if not (key in self.replaced and is_text(value))}
            if (sections := sections_of_strings(kept)) != content:
                result.config = OmegaConf.create(sections)
        return result
