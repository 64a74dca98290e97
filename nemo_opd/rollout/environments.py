"""Environments by `environment.type`."""

from collections.abc import Callable
from typing import Any

from nemo_opd.config.choices import choices, require_lines
from nemo_opd.config.environment import CalculatorEnvironment, EnvironmentBase, FunctionEnvironment
from nemo_opd.config.environment import Environment as Settings
from nemo_opd.errors import ConfigError
from nemo_opd.rollout.calculator import Calculator
from nemo_opd.rollout.environment import Environment, EnvironmentFactory
from nemo_opd.users_code import imported


def _users_class(settings: FunctionEnvironment) -> Callable[[], Environment]:
    """Import the class named by `package.module:Class`. Raises ConfigError if it is not an environment."""
    reference = settings.function
    imported_object = imported(reference, key="environment.function", form="package.module:Class")
    is_class = isinstance(imported_object, type)
    missing = [method for method in ("reset", "step") if not callable(getattr(imported_object, method, None))]
    if not is_class or missing:
        problem = f"without {' and '.join(missing)}" if is_class else f"a {type(imported_object).__name__}"
        raise ConfigError(
            f"environment.function={reference}: it is {problem}; name a class with the methods of "
            "nemo_opd.rollout.environment.Environment"
        )
    environment: Callable[[], Environment] = imported_object
    return environment


ENVIRONMENTS: dict[type[EnvironmentBase], Callable[[Any], Callable[[], Environment]]] = {
    CalculatorEnvironment: lambda _: Calculator,
    FunctionEnvironment: _users_class,
}
"""Settings → function that returns the environment's class."""
require_lines(choices(Settings), ENVIRONMENTS, "ENVIRONMENTS in nemo_opd/rollout/environments.py")


def build_environment(settings: Settings) -> EnvironmentFactory:
    """Build the factory of environments. Raises ConfigError for an unusable class."""
    return EnvironmentFactory(ENVIRONMENTS[type(settings)](settings), settings)
