"""A weighted sum of rewards."""

from collections.abc import Sequence

from nemo_opd.config.reward import WeightedReward
from nemo_opd.data.record import Rollout
from nemo_opd.rewards.base import Compound, RewardFunction


class WeightedSum(Compound):
    """The weighted sum of several rewards. The first part with votes provides the votes."""

    def __init__(self, settings: WeightedReward, parts: Sequence[RewardFunction]) -> None:
        super().__init__(settings, parts)
        self._weights = [term.weight for term in settings.terms]
        self._voter = next((part for part in parts if part.votes), None)

    def score(self, rollout: Rollout) -> float:
        return sum(weight * part(rollout) for weight, part in zip(self._weights, self.rewards, strict=True))

    def expect(self, rollouts: Sequence[Rollout]) -> None:
        for part in self.rewards:
            part.expect(rollouts)

    def vote(self, rollout: Rollout) -> str | None:
        return None if self._voter is None else self._voter.vote(rollout)
