"""A reward of 1 if the last turn is the answer."""

from nemo_opd.config.reward import ExactReward
from nemo_opd.data.record import Rollout
from nemo_opd.errors import DataError
from nemo_opd.rewards.base import RewardFunction, last_turn
from nemo_opd.rewards.extraction import build_extractor


class ExactMatch(RewardFunction):
    """A reward of 1 if the texts are equal except for surrounding white space, else 0."""

    votes = True

    def __init__(self, settings: ExactReward) -> None:
        super().__init__(settings)
        self._extract = build_extractor(settings.extract)
        self._ignore_case = settings.ignore_case

    @classmethod
    def check_answer(cls, answer: str) -> None:
        if not answer.strip():
            raise DataError(f"the answer {answer!r} is empty, so reward.type=exact has nothing to compare with")

    def score(self, rollout: Rollout) -> float:
        return float(self.vote(rollout) == self._canonical(self.answer(rollout)))

    def vote(self, rollout: Rollout) -> str | None:
        return self._canonical(self._extract(last_turn(rollout)) or "") or None

    def _canonical(self, text: str) -> str:
        text = text.strip()
        return text.casefold() if self._ignore_case else text
