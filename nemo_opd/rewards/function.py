"""A user's own reward."""

from collections.abc import Callable
from typing import Any

from nemo_opd.config.reward import FunctionReward
from nemo_opd.errors import ConfigError, RolloutError
from nemo_opd.rewards.base import RewardFunction
from nemo_opd.rollout.imported import imported
from nemo_opd.rollout.record import Rollout


class UserFunction(RewardFunction):
    """Raises ConfigError where there is no such function, and RolloutError for what it raises."""

    def __init__(self, settings: FunctionReward) -> None:
        self.name = settings.function
        self._function = reward_function(settings.function)

    def score(self, rollout: Rollout) -> float:
        try:
            return self._function(rollout)
        except Exception as error:
            raise RolloutError(f"{self.at(rollout)}: it raised {type(error).__name__}: {error}") from error


def reward_function(reference: str) -> Callable[[Rollout], Any]:
    """The function that `package.module:function` names. Raises ConfigError for what is none."""
    found = imported(reference, key="reward.function", form="package.module:function")
    if not callable(found):
        raise ConfigError(f"reward.function={reference}: it is a {type(found).__name__}; name a function")
    function: Callable[[Rollout], Any] = found
    return function
