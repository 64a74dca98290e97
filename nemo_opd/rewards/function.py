"""A user-defined reward."""

import inspect

from nemo_opd.config.reward import FunctionReward
from nemo_opd.data.record import Rollout
from nemo_opd.errors import ConfigError, RolloutError
from nemo_opd.rewards.base import RewardFunction
from nemo_opd.users_code import UsersCodeError, called, imported


class UserFunction(RewardFunction):
    """A reward computed by the function at `package.module:function`."""

    def __init__(self, settings: FunctionReward) -> None:
        """Import the function. Raises ConfigError if it cannot be imported, or cannot be called with only a rollout."""
        super().__init__(settings)
        self.name = settings.function
        self._timeout_s = settings.call_timeout_s
        self._function = imported(self.name, key="reward.function", form="package.module:function")
        if not callable(self._function):
            raise ConfigError(f"reward.function={self.name}: it is a {type(self._function).__name__}; name a function")
        self._require_one_argument()

    def score(self, rollout: Rollout) -> float:
        """Call the function. Raises RolloutError if it raises or does not return in time."""
        try:
            return called(self._function, rollout, timeout_s=self._timeout_s, key="reward.call_timeout_s")
        except UsersCodeError as error:
            raise RolloutError(f"{self.at(rollout)}: it {error}") from error

    def _require_one_argument(self) -> None:
        try:
            signature = inspect.signature(self._function)
        except (TypeError, ValueError):  # many C functions have no signature
            return
        try:
            signature.bind(None)
        except TypeError as error:
            raise ConfigError(
                f"reward.function={self.name}: it is called with a Rollout and nothing else, but it takes {signature} "
                f"({error}); give the other parameters defaults"
            ) from None
