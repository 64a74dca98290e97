"""Validation of settings that are plain data."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from nemo_opd.config.base import Settings, explain_all
from nemo_opd.config.run import RunConfig
from nemo_opd.config.run_fields import RunFields
from nemo_opd.config.short_form import long_form
from nemo_opd.errors import ConfigError

S = TypeVar("S", bound=Settings)


def from_dict(data: Mapping[str, Any]) -> RunConfig:
    """Validate a run's settings. Raises ConfigError with a line for each problem."""
    return validated(data, RunConfig)


def validated(data: Mapping[str, Any], model: type[S]) -> S:
    """Validate plain data. Raises ConfigError with a line for each problem."""
    if issubclass(model, RunFields):
        data = long_form(data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain_all(error.errors(), data, model))) from None
