"""The environment of each `environment.type`."""

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
    """Import the class that `package.module:Class` names. Raises ConfigError where it is no environment."""
    reference = settings.function
    found = imported(reference, key="environment.function", form="package.module:Class")
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        what = f"a {type(found).__name__}" if not isinstance(found, type) else f"without {' and '.join(missing)}"
        raise ConfigError(
            f"environment.function={reference}: it is {what}; name a class with the methods of "
            "nemo_opd.rollout.environment.Environment"
        )
    made: Callable[[], Environment] = found
    return made


ENVIRONMENTS: dict[type[EnvironmentBase], Callable[[Any], Callable[[], Environment]]] = {
    CalculatorEnvironment: lambda _: Calculator,
    FunctionEnvironment: _users_class,
}
"""Settings → function that returns the environment's class."""
require_lines(choices(Settings), ENVIRONMENTS, "ENVIRONMENTS in nemo_opd/rollout/environments.py")


def build_environment(settings: Settings) -> EnvironmentFactory:
    """Return the constructor of environments. Raises ConfigError for a class that cannot be used."""
    return EnvironmentFactory(ENVIRONMENTS[type(settings)](settings), settings)
