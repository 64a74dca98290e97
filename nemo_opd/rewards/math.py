"""Reward 1 where the last boxed formula is equal to the answer."""

import re

from nemo_opd.config.reward import MathReward
from nemo_opd.data.record import Rollout
from nemo_opd.errors import DataError
from nemo_opd.rewards.base import RewardFunction, last_turn
from nemo_opd.rewards.equivalence import Equivalence

_BOX = re.compile(r"\\f?boxed\s*(?:\{|(?P<one>[0-9A-Za-z]))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class MathMatch(RewardFunction):
    """1 where the last \\boxed{…} of the last turn is mathematically equal to the answer, else 0."""

    votes = True

    def __init__(self, settings: MathReward) -> None:
        super().__init__(settings)
        self._equivalence = Equivalence(settings.timeout_s)

    @classmethod
    def check_answer(cls, answer: str) -> None:
        _formula_of(answer)

    def score(self, rollout: Rollout) -> float:
        wanted, given = _formula_of(self.answer(rollout)), last_boxed(last_turn(rollout))
        return float(given is not None and self._equivalence.equal(wanted, given))

    def vote(self, rollout: Rollout) -> str | None:
        given = last_boxed(last_turn(rollout))
        return self._equivalence.canonical(given) if given else None

    def begin(self) -> None:
        self._equivalence.begin()

    def close(self) -> None:
        self._equivalence.close()


def _formula_of(answer: str) -> str:
    """Return the content of the answer's last box, or the whole answer without one.

    Raises DataError where that is empty or its braces are not balanced.
    """
    boxed = last_boxed(answer)
    formula = answer.strip().strip("$").strip() if boxed is None else boxed
    if not formula:
        raise DataError(f"the answer {answer!r} holds no formula that reward.type=math could compare with")
    bare = formula.replace("\\{", "").replace("\\}", "")
    if bare.count("{") != bare.count("}"):
        raise DataError(f"the answer {answer!r} has braces that are not balanced, so reward.type=math cannot read it")
    return formula


def last_boxed(text: str) -> str | None:
    """Return the content of the last box whose braces are balanced, stripped; None where no box is closed.

    \\boxed 5 is a box too. Of a box within a box the outer one counts.
    """
    content, end = None, 0
    closing = _closing_braces(text)
    for box in _BOX.finditer(text):
        if box.start() < end:
            continue
        if box["one"] is not None:
            content, end = box["one"], box.end()
        elif box.end() - 1 in closing:
            end = closing[box.end() - 1]
            content = text[box.end() : end].strip()
    return content


def _closing_braces(text: str) -> dict[int, int]:
    """Return, by the position of each opening brace, that of its closing one; escaped braces do not count."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for found in _BRACE.finditer(text):
        if found[0] == "{":
            opened.append(found.start())
        elif found[0] == "}" and opened:
            closing[opened.pop()] = found.start()
    return closing
