"""Reward 1 for the very words of the answer."""

from nemo_opd.config.reward import ExactReward
from nemo_opd.data.record import Rollout
from nemo_opd.rewards.base import RewardFunction, answer_of, last_turn


class Exact(RewardFunction):
    name = "exact"
    votes = True

    def __init__(self, settings: ExactReward) -> None:
        self.ignore_case = settings.ignore_case

    def score(self, rollout: Rollout) -> float:
        return float(self.vote(rollout) == self._canonical(answer_of(rollout, self)))

    def vote(self, rollout: Rollout) -> str | None:
        return self._canonical(last_turn(rollout)) or None

    def _canonical(self, text: str) -> str:
        text = text.strip()
        return text.casefold() if self.ignore_case else text
