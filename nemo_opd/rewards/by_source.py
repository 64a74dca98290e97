"""A reward selected by a column of the row."""

from collections.abc import Mapping, Sequence

from nemo_opd.config.reward import SourceReward
from nemo_opd.data.record import Rollout
from nemo_opd.errors import RolloutError
from nemo_opd.rewards.base import Compound, RewardFunction


class RewardBySource(Compound):
    """A compound reward that uses the part for the rollout's source."""

    def __init__(self, settings: SourceReward, by_source: Mapping[str, RewardFunction]) -> None:
        super().__init__(settings, tuple(by_source.values()))
        self._key, self._by_source = settings.key, by_source

    def score(self, rollout: Rollout) -> float:
        """Return the reward. Raises RolloutError for a source without one."""
        return self._part(rollout)(rollout)

    def expect(self, rollouts: Sequence[Rollout]) -> None:
        for reward in self.rewards:
            reward.expect([rollout for rollout in rollouts if self._part(rollout) is reward])

    def vote(self, rollout: Rollout) -> str | None:
        return self._part(rollout).vote(rollout)

    def _part(self, rollout: Rollout) -> RewardFunction:
        source = str(rollout.prompt.row.get(self._key))
        part = self._by_source.get(source) or self._by_source.get("default")
        if part is None:
            raise RolloutError(f"{self.at(rollout)}: {self._key}={source!r} has no reward; add it under reward.rewards")
        return part
