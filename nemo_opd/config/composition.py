"""One-line explanations of Hydra's and OmegaConf's errors, which name the override or the file."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hydra
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import MarkedYAMLError

from nemo_opd.config.command_line import INLINE, CommandLine
from nemo_opd.errors import ConfigError


@contextmanager
def composition_errors(command: CommandLine) -> Iterator[None]:
    """Turn Hydra's and OmegaConf's errors in the block into ConfigError; Hydra's own report has no clear last line."""
    previous = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of exiting
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_explain_composition(error, command)) from error
    finally:
        if previous is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = previous


def _explain_composition(error: Exception, command: CommandLine) -> str:
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark or error.context_mark):
        return (
            f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: invalid YAML: "
            f"{error.problem or error.context}; correct the file"
        )
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        return f"stdout cannot be written ({os.strerror(error.errno)}); send the output elsewhere, or make room"
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        options = ", ".join(option for option in error.options if not option.startswith(INLINE))
        if not name:
            return f"{group}=: it is empty; choose one of {options}"
        return f"{group}={name}: there is no such file in the group; choose one of {options}"
    if isinstance(error, OverrideParseException):
        override = error.override.removeprefix("++")
        return f"{override}: cannot be read as key=value; quote a value with special characters, as in 'key=\"a(b\"'"
    if isinstance(error, MissingConfigException):
        return f"{str(error).splitlines()[0].rstrip('.')}; the files are in {command.config_file.parent}"
    wrong, base = _first_failing(command)
    if wrong is not None and base is not None and (reason := _explain_list_key(wrong, base)):
        return f"{wrong}: {reason}"
    if wrong is not None and "--multirun" in str(error):
        return f"{wrong}: several values; write key=[a,b] for a list, or add --multirun for a run with each value"
    lines = [line.strip().rstrip(".") for line in str(error.__cause__ or error).splitlines() if line.strip()]
    reason = "; ".join(lines[:2]).replace("++", "") or type(error).__name__
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
