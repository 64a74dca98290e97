"""The reward that the environment paid."""

from nemo_opd.data.record import Rollout
from nemo_opd.errors import RolloutError
from nemo_opd.rewards.base import RewardFunction


class EnvironmentPay(RewardFunction):
    """Sum of what the environment paid in all turns."""

    def score(self, rollout: Rollout) -> float:
        if rollout.env_reward is None:
            raise RolloutError(
                f"{self.at(rollout)}: there was no environment to pay it; set `environment`, or another reward.type"
            )
        return rollout.env_reward
