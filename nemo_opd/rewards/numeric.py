"""Reward 1 where the last number is the answer."""

from nemo_opd.config.reward import NumericReward
from nemo_opd.data.record import Rollout
from nemo_opd.errors import DataError
from nemo_opd.rewards.base import RewardFunction, last_turn
from nemo_opd.rewards.written_numbers import WrittenNumber, last_number


class NumericMatch(RewardFunction):
    """1 where the last number of the last turn is the answer's within a relative tolerance, else 0."""

    votes = True

    def __init__(self, settings: NumericReward) -> None:
        super().__init__(settings)
        self._tolerance = settings.tolerance

    @classmethod
    def check_answer(cls, answer: str) -> None:
        _number_of(answer)

    def score(self, rollout: Rollout) -> float:
        wanted, given = _number_of(self.answer(rollout)), last_number(last_turn(rollout))
        return float(given is not None and given.is_near(wanted, self._tolerance))

    def vote(self, rollout: Rollout) -> str | None:
        given = last_number(last_turn(rollout))
        return None if given is None else str(given)


def _number_of(answer: str) -> WrittenNumber:
    """Return the answer's last number. Raises DataError where it has none."""
    number = last_number(answer)
    if number is None:
        raise DataError(f"the answer {answer!r} holds no number that reward.type=numeric could compare with")
    return number
