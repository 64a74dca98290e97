"""Optional libraries and programs: those of runs and the command, and those that only some settings need."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from nemo_opd.errors import ConfigError

if TYPE_CHECKING:
    from nemo_opd.config.reward import Reward
    from nemo_opd.config.rollout import Rollouts
    from nemo_opd.config.run_fields import Logging

TRAIN = (
    "argcomplete",
    "datasets",
    "httpx2",
    "hydra",
    "matplotlib",
    "peft",
    "psutil",
    "pyarrow",
    "ray",
    "rich",
)
"""Modules of the extra `train`."""
EXTRAS = {
    "wandb": "logging",
    "tensorboard": "logging",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "math_verify": "eval",
    "jsonschema": "eval",
    "lm_eval": "eval",
    "bitsandbytes": "quantised",
    "peft": "train",
}
"""Module → extra."""
HOW_TO_INSTALL = {
    "vllm": "run tools/rollout/install_vllm.sh and set rollout.command to the vllm that it installs",
    "sglang": "install it in another environment and set rollout.command to its command there",
}
"""Keyed by `rollout.program`."""


def require_train(purpose: str) -> None:
    """Raise ImportError, with the way to install it, if a part of the extra `train` is missing."""
    if missing := [module for module in TRAIN if find_spec(module) is None]:
        raise ImportError(
            f"{purpose}: needs packages that are not installed ({', '.join(missing)}); run "
            "`pip install 'nemo-opd[train]'`"
        )


def require_extras(logging: Logging | None, reward: Reward | None) -> None:
    """Raise ConfigError for a setting whose library is not installed."""
    for setting, module in _needed(logging, reward):
        require_library(module, setting)


def _needed(logging: Logging | None, reward: Reward | None) -> Iterator[tuple[str, str]]:
    for library in () if logging is None else ("wandb", "tensorboard", "mlflow", "trackio"):
        if getattr(logging, library).enabled:
            yield f"logging.{library}.enabled=true", library
    for part in () if reward is None else reward.parts:
        if part.type == "math":
            yield "reward.type=math", "math_verify"
        if (file := getattr(getattr(part, "extract", None), "schema_file", None)) is not None:
            yield f"reward.extract.schema_file={file}", "jsonschema"


def require_library(module: str, setting: str) -> None:
    """Raise ConfigError if a library that a setting needs is not installed."""
    if find_spec(module) is None:
        raise ConfigError(
            f"{setting}: needs the library {module}, which is not installed; run "
            f"`pip install 'nemo-opd[{EXTRAS[module]}]'`, or leave the setting out"
        )


def require_installed(settings: Rollouts | None) -> None:
    """Raise ConfigError if the server that the run would start is not installed."""
    if settings is None or settings.type != "server" or settings.url is not None:
        return
    program, path = settings.program, settings.environment.get("PATH")
    way_out = f"{HOW_TO_INSTALL[program]}, or set rollout.url to a running server"
    if settings.command is not None:
        if shutil.which(settings.command[0], path=path) is None:
            raise ConfigError(f"rollout.command={settings.command[0]}: there is no such program; {way_out}")
        return
    # The default command of SGLang is a module of this environment.
    location = find_spec("sglang") if program == "sglang" else shutil.which("vllm", path=path)
    if location is None:
        raise ConfigError(f"rollout.program={program}: it is not installed here; {way_out}")
