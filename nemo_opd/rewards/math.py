"""A reward of 1 if the last boxed formula equals the answer."""

from nemo_opd.config.reward import MathReward
from nemo_opd.data.record import Rollout
from nemo_opd.errors import DataError
from nemo_opd.rewards.base import RewardFunction, last_turn
from nemo_opd.rewards.boxes import last_boxed
from nemo_opd.rewards.equivalence import Equivalence
from nemo_opd.rewards.extraction import build_extractor


class MathMatch(RewardFunction):
    """A reward of 1 if the last \\boxed{…} of the last turn is mathematically equal to the answer, else 0."""

    votes = True

    def __init__(self, settings: MathReward) -> None:
        super().__init__(settings)
        self._extract = build_extractor(settings.extract)
        self._equivalence = Equivalence(settings.timeout_s)

    @classmethod
    def check_answer(cls, answer: str) -> None:
        _formula_of(answer)

    def score(self, rollout: Rollout) -> float:
        expected, formula = _formula_of(self.answer(rollout)), self._extract(last_turn(rollout))
        return float(formula is not None and self._equivalence.equal(expected, formula))

    def vote(self, rollout: Rollout) -> str | None:
        formula = self._extract(last_turn(rollout))
        return self._equivalence.canonical(formula) if formula else None

    def begin(self) -> None:
        self._equivalence.begin()

    def close(self) -> None:
        self._equivalence.close()


def _formula_of(answer: str) -> str:
    """Return the content of the answer's last box or, without a box, the whole answer.

    Raises DataError if it is empty or its braces are not balanced.
    """
    boxed = last_boxed(answer)
    formula = answer.strip().strip("$").strip() if boxed is None else boxed
    if not formula:
        raise DataError(f"the answer {answer!r} holds no formula that reward.type=math could compare with")
    bare = formula.replace("\\{", "").replace("\\}", "")
    if bare.count("{") != bare.count("}"):
        raise DataError(f"the answer {answer!r} has braces that are not balanced, so reward.type=math cannot read it")
    return formula
