"""From the command line to validated settings: Hydra composes, pydantic checks."""

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args

import hydra
import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nemo_opd.config.base import Settings
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import ConfigError

S = TypeVar("S", bound=Settings)

PLAIN_OVERRIDE = re.compile(r"^[A-Za-z_][\w.]*=")
OVERRIDE = re.compile(r"^(~|\+{0,2}[A-Za-z_][\w./@:]*=)")

# A run owns one directory, run.output_dir; Hydra adds no folders or log files of its own.
QUIET_HYDRA = (
    "hydra.run.dir=.",
    "hydra.sweep.dir=outputs/multirun",
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


def run_with_hydra(task: Callable[[RunConfig], None], *, config_dir: Path, config_name: str) -> None:
    """`run_settings_with_hydra` for the settings of a run."""
    run_settings_with_hydra(task, RunConfig, config_dir=config_dir, config_name=config_name)


def run_settings_with_hydra(task: Callable[[S], None], model: type[S], *, config_dir: Path, config_name: str) -> None:
    """Compose `config_dir/config_name` with the command line's overrides, make a `model` of it, and hand it to `task`.

    All of Hydra's command line works, and `--config FILE` beside it. What `task` raises is raised here; of a
    `--multirun` the first error, once every job has had its turn.
    """
    failures: list[Exception] = []

    def guarded(cfg: DictConfig) -> None:
        # Hydra turns an exception that passes through it into a trimmed traceback and exit status 1.
        try:
            task(from_omegaconf(cfg, model))
        except Exception as error:
            failures.append(error)

    given = sys.argv[1:]
    sys.argv[1:] = hydra_arguments(given, config_dir)
    with composition_errors(given):
        hydra.main(version_base="1.3", config_path=str(config_dir), config_name=config_name)(guarded)()
    if failures:
        raise failures[0]


@contextmanager
def composition_errors(arguments: Sequence[str]) -> Iterator[None]:
    """What Hydra and OmegaConf raise inside becomes a ConfigError; Hydra's own report has no clear last line."""
    previous = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises only when asked to
    try:
        yield
    except Exception as error:
        raise ConfigError(explain_composition(error, arguments)) from error
    finally:
        if previous is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = previous


def explain_composition(error: Exception, arguments: Sequence[str]) -> str:
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name}: there is no such file in the group; choose one of {', '.join(error.options)}"
    if isinstance(error, OverrideParseException):
        override = error.override.removeprefix("++")
        return f"{override}: cannot be read as key=value; quote a value with special characters, as in 'key=\"a(b\"'"
    reason = "; ".join(lines[:2]).replace("++", "") or type(error).__name__
    return f"{' '.join(arguments)}: the configuration cannot be composed ({reason}); correct the override it names"


def hydra_arguments(arguments: Sequence[str], config_dir: Path) -> list[str]:
    """The arguments as Hydra needs them: options, then overrides.

    `--config FILE` becomes the folder and the name of the primary config, with `config_dir` still searched for groups.
    A plain `key=value` becomes `++key=value`: the YAML files name only what differs from the defaults, so a key's
    absence there says nothing, and pydantic is what refuses unknown keys.
    """
    options: list[str] = []
    overrides = [*QUIET_HYDRA, f"hydra.job.name='{Path(sys.argv[0]).stem}'"]
    remaining = iter(arguments)
    for argument in remaining:
        flag, _, value = argument.partition("=")
        if flag == "--config":
            file = config_file(value or next(remaining, ""), config_dir)
            options += ["--config-path", str(file.parent), "--config-name", file.stem]
            overrides.append(f"hydra.searchpath=[file://{config_dir.resolve()}]")
        elif PLAIN_OVERRIDE.match(argument) and not is_group(flag, config_dir):
            overrides.append(f"++{argument}")
        elif OVERRIDE.match(argument):
            overrides.append(argument)
        else:
            options.append(argument)
    return options + overrides


def config_file(name: str, config_dir: Path) -> Path:
    file = Path(name)
    if not file.is_file():
        raise ConfigError(
            f"--config={name}: there is no such file; give the path of a YAML file like those in {config_dir}"
        )
    return file.resolve()


def is_group(key: str, config_dir: Path) -> bool:
    return key.startswith("hydra") or (config_dir / key.replace(".", "/")).is_dir()


def from_omegaconf(cfg: DictConfig, model: type[S]) -> S:
    try:
        data = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: required, but not given; write {error.full_key}=VALUE") from error
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{error.full_key or 'the config'}: {reason}; correct the reference") from error
    assert isinstance(data, dict)
    return validated({str(key): value for key, value in data.items()}, model)


def from_dict(data: Mapping[str, Any]) -> RunConfig:
    """The settings of a run; every problem found is one line of a ConfigError."""
    return validated(data, RunConfig)


def validated(data: Mapping[str, Any], model: type[S]) -> S:
    """Validate plain data; every problem found is one line of a ConfigError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem, data, model) for problem in error.errors())) from None


def from_yaml(path: Path) -> RunConfig:
    """Read a run's resolved config.yaml."""
    return from_dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def to_yaml(config: Settings) -> str:
    """Resolved and sufficient to repeat the run."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def explain(problem: ErrorDetails, data: Mapping[str, Any], model: type[BaseModel]) -> str:
    """`key=value: reason; way out`, with the key as it is written on the command line."""
    kind, value = problem["type"], problem["input"]
    path = real_path(problem["loc"], data, ends_in_key=kind != "value_error")
    key = ".".join(map(str, path))
    shown = "null" if value is None else repr(value)
    reason = re.sub("^(Input|String) should", "must", problem["msg"].removeprefix("Value error, "))
    if kind == "extra_forbidden":
        return f"{key}={shown}: there is no such key{suggestion(path, data, model)}"
    if kind in ("missing", "union_tag_not_found"):
        return f"{key}{'.type' * (kind != 'missing')}: required, but not given"
    if kind == "union_tag_invalid":
        return f"{key}.type={value['type']!r}: choose one of {problem['ctx']['expected_tags']}"
    if kind in ("model_type", "model_attributes_type"):
        known = ", ".join(known_keys(path, data, model))
        return f"{key}={shown}: a group of keys, not one value; set {key}.KEY of {known}"
    if kind == "value_error":
        return f"{key}: {reason}" if key else reason
    if kind == "string_type" and isinstance(value, int | float):
        reason += f"; to make text of it, write {key}=\"'{value}'\""
    return f"{key}={shown}: {reason[0].lower()}{reason[1:]}"


def real_path(location: tuple[int | str, ...], data: Any, *, ends_in_key: bool) -> list[int | str]:
    """The location without the tags that pydantic adds for members of a union.

    ends_in_key: its end is no tag, but may be a key that is missing.
    """
    path: list[int | str] = []
    for i, part in enumerate(location):
        may_be_tag = i + 1 < len(location) or not ends_in_key
        if may_be_tag and isinstance(data, Mapping) and part not in data and data.get("type") == part:
            continue
        path.append(part)
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, Sequence) and isinstance(part, int):
            data = data[part] if part < len(data) else None  # an element that is missing has a place too
    return path


def suggestion(path: list[int | str], data: Mapping[str, Any], model: type[BaseModel]) -> str:
    siblings = known_keys(path[:-1], data, model)
    close = difflib.get_close_matches(str(path[-1]), siblings, n=1)
    if close:
        return f"; did you mean {'.'.join(map(str, [*path[:-1], close[0]]))}?"
    return f"; known here: {', '.join(siblings)}" if siblings else ""


def known_keys(path: Sequence[int | str], data: Any, model: type[BaseModel]) -> list[str]:
    """The keys that the settings at `path` of a `model` accept, given the `type` tags in the data."""
    models = [model]
    for part in path:
        data = data[part]
        if isinstance(part, str):
            fields = [model.model_fields[part].annotation for model in models if part in model.model_fields]
            models = [model for annotation in fields for model in models_in(annotation)]
        tag = data.get("type") if isinstance(data, Mapping) else None
        models = [model for model in models if tag is None or accepts_tag(model, tag)] or models
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def accepts_tag(model: type[BaseModel], tag: object) -> bool:
    field = model.model_fields.get("type")
    return field is not None and tag in get_args(field.annotation)
