"""Libraries that only some settings need, installed with an extra of the package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from nemo_opd.errors import ConfigError

if TYPE_CHECKING:
    from nemo_opd.config.logging import Logging
    from nemo_opd.config.reward import Reward

EXTRAS = {
    "wandb": "logging",
    "tensorboard": "logging",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "math_verify": "eval",
    "jsonschema": "eval",
    "lm_eval": "eval",
    "bitsandbytes": "quantised",
}
"""Module → extra."""


def require_extras(logging: Logging | None, reward: Reward | None) -> None:
    """Raise ConfigError for a setting whose library is not installed."""
    for setting, module in _needed(logging, reward):
        require_library(module, setting)


def require_library(module: str, setting: str) -> None:
    """Raise ConfigError if a library that a setting needs is not installed."""
    if find_spec(module) is None:
        raise ConfigError(
            f"{setting}: needs the library {module}, which is not installed; run "
            f"`pip install 'nemo-opd[{EXTRAS[module]}]'`, or leave the setting out"
        )


def _needed(logging: Logging | None, reward: Reward | None) -> Iterator[tuple[str, str]]:
    for library in () if logging is None else ("wandb", "tensorboard", "mlflow", "trackio"):
        if getattr(logging, library).enabled:
            yield f"logging.{library}.enabled=true", library
    for part in () if reward is None else reward.parts:
        if part.type == "math":
            yield "reward.type=math", "math_verify"
        if (file := getattr(getattr(part, "extract", None), "schema_file", None)) is not None:
            yield f"reward.extract.schema_file={file}", "jsonschema"
