"""A user's own reward."""

import inspect
from collections.abc import Callable
from typing import Any

from nemo_opd.config.reward import FunctionReward
from nemo_opd.data.record import Rollout
from nemo_opd.errors import ConfigError, RolloutError
from nemo_opd.rewards.base import RewardFunction
from nemo_opd.users_code import UsersCodeError, called, imported


class UserFunction(RewardFunction):
    """Raises ConfigError where there is no such function, and RolloutError for what it raises."""

    def __init__(self, settings: FunctionReward) -> None:
        self.name = settings.function
        self._function = reward_function(settings.function)
        self._timeout_s = settings.call_timeout_s

    def score(self, rollout: Rollout) -> float:
        try:
            return called(self._function, rollout, timeout_s=self._timeout_s, key="reward.call_timeout_s")
        except UsersCodeError as error:
            raise RolloutError(f"{self.at(rollout)}: it {error}") from error


def reward_function(reference: str) -> Callable[[Rollout], Any]:
    """The function that `package.module:function` names. Raises ConfigError for what is none."""
    found = imported(reference, key="reward.function", form="package.module:function")
    if not callable(found):
        raise ConfigError(f"reward.function={reference}: it is a {type(found).__name__}; name a function")
    require_one_argument(found, reference)
    function: Callable[[Rollout], Any] = found
    return function


def require_one_argument(function: Callable[..., Any], reference: str) -> None:
    """Raise ConfigError for what cannot be called with a rollout alone, as far as it says what it takes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # as of many functions in C
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"reward.function={reference}: it is called with a Rollout and nothing else, but it takes {signature} "
            f"({error}); give the other parameters defaults"
        ) from None
