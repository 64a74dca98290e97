"""The environment's reward."""

from nemo_opd.data.record import Rollout
from nemo_opd.errors import RolloutError
from nemo_opd.rewards.base import RewardFunction


class EnvironmentPay(RewardFunction):
    """The sum of the environment's rewards over all turns."""

    def score(self, rollout: Rollout) -> float:
        if rollout.env_reward is None:
            raise RolloutError(
                f"{self.at(rollout)}: the run has no environment; set `environment`, or another reward.type"
            )
        return rollout.env_reward
