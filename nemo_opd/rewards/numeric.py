"""Reward 1 for the right number."""

from nemo_opd.config.reward import NumericReward
from nemo_opd.data.record import Rollout
from nemo_opd.errors import DataError
from nemo_opd.rewards.base import RewardFunction, answer_of, last_turn
from nemo_opd.rewards.spoken_numbers import Spoken, last_number


class Numeric(RewardFunction):
    name = "numeric"
    votes = True

    def __init__(self, settings: NumericReward) -> None:
        self.tolerance = settings.tolerance

    def score(self, rollout: Rollout) -> float:
        wanted = number_of_answer(answer_of(rollout, self))
        given = last_number(last_turn(rollout))
        return float(given is not None and given.is_near(wanted, self.tolerance))

    def vote(self, rollout: Rollout) -> str | None:
        given = last_number(last_turn(rollout))
        return None if given is None else str(given)


def number_of_answer(answer: str) -> Spoken:
    """Raises DataError where it has none."""
    number = last_number(answer)
    if number is None:
        raise DataError(f"the answer {answer!r} holds no number that reward.type=numeric could compare with")
    return number
