"""Reward 1 for a boxed formula that is equal to the answer."""

from nemo_opd.config.reward import MathReward
from nemo_opd.data.record import Rollout
from nemo_opd.errors import DataError
from nemo_opd.rewards.base import RewardFunction, answer_of, last_turn
from nemo_opd.rewards.boxed import last_boxed
from nemo_opd.rewards.equivalence import Equivalence


class Math(RewardFunction):
    name = "math"
    votes = True

    def __init__(self, settings: MathReward) -> None:
        self._equivalence = Equivalence(settings.timeout_s)

    def score(self, rollout: Rollout) -> float:
        wanted = formula_of_answer(answer_of(rollout, self))
        given = last_boxed(last_turn(rollout))
        return float(given is not None and self._equivalence.equal(wanted, given))

    def vote(self, rollout: Rollout) -> str | None:
        given = last_boxed(last_turn(rollout))
        return self._equivalence.canonical(given) if given else None

    def begin(self) -> None:
        self._equivalence.begin()

    def close(self) -> None:
        self._equivalence.close()


def formula_of_answer(answer: str) -> str:
    """The answer, or what is boxed in it. Raises DataError where that is empty or its braces are not balanced."""
    boxed = last_boxed(answer)
    formula = answer.strip().strip("$").strip() if boxed is None else boxed
    if not formula:
        raise DataError(f"the answer {answer!r} holds no formula that reward.type=math could compare with")
    bare = formula.replace("\\{", "").replace("\\}", "")
    if bare.count("{") != bare.count("}"):
        raise DataError(f"the answer {answer!r} has braces that are not balanced, so reward.type=math cannot read it")
    return formula
