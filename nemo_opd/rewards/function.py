"""A user's own reward."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_opd.config.reward import FunctionReward
from nemo_opd.errors import ConfigError, RolloutError
from nemo_opd.rewards.base import RewardFunction
from nemo_opd.rollout.record import Rollout


class UserFunction(RewardFunction):
    """Raises ConfigError where there is no such function, and RolloutError for what it raises."""

    def __init__(self, settings: FunctionReward) -> None:
        self.name = settings.function
        self._function = imported(settings.function)

    def score(self, rollout: Rollout) -> float:
        try:
            return self._function(rollout)
        except Exception as error:
            raise RolloutError(f"{self.at(rollout)}: it raised {type(error).__name__}: {error}") from error


def imported(reference: str) -> Callable[[Rollout], Any]:
    """The function that `package.module:function` names; the working folder is looked in too."""
    module_name, _, name = reference.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # what a module raises when imported shares no base class
        raise ConfigError(
            f"reward.function={reference}: cannot be imported ({type(error).__name__}: {error}); give "
            "`package.module:function`, with the package installed or in the working folder"
        ) from error
    if not callable(found):
        raise ConfigError(f"reward.function={reference}: it is a {type(found).__name__}; name a function")
    return found
