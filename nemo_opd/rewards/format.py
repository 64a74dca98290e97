"""A reward of 1 if the last turn has a format."""

from nemo_opd.config.reward import FormatReward
from nemo_opd.data.record import Rollout
from nemo_opd.rewards.base import RewardFunction, last_turn
from nemo_opd.rewards.extraction import build_extractor


class FormatMatch(RewardFunction):
    """A reward of 1 if the extraction succeeds, else 0."""

    def __init__(self, settings: FormatReward) -> None:
        """Build the extraction. Raises ConfigError for an unreadable schema."""
        super().__init__(settings)
        self._extract = build_extractor(settings.extract)

    def score(self, rollout: Rollout) -> float:
        return float(self._extract(last_turn(rollout)) is not None)
