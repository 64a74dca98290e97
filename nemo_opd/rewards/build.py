"""From settings to a reward, and whether the answers of a dataset fit it."""

from collections.abc import Iterable

from nemo_opd.config.reward import (
    AnswerReward,
    EnvironmentReward,
    ExactReward,
    FunctionReward,
    MathReward,
    NumericReward,
    Reward,
)
from nemo_opd.data.record import Prompt
from nemo_opd.errors import DataError
from nemo_opd.rewards.base import RewardFunction
from nemo_opd.rewards.environment import Paid
from nemo_opd.rewards.exact import Exact
from nemo_opd.rewards.function import UserFunction
from nemo_opd.rewards.math import Math, formula_of_answer
from nemo_opd.rewards.numeric import Numeric, number_of_answer


def build_reward(settings: Reward) -> RewardFunction:
    """A function Rollout → float, to be closed by `with`. Raises ConfigError where a user's function is not there."""
    match settings:
        case ExactReward():
            return Exact(settings)
        case NumericReward():
            return Numeric(settings)
        case MathReward():
            return Math(settings)
        case EnvironmentReward():
            return Paid()
        case FunctionReward():
            return UserFunction(settings)


def compares_answers(settings: Reward) -> bool:
    """Whether every prompt needs an answer."""
    return isinstance(settings, AnswerReward)


def check_answer(settings: Reward, answer: str | None) -> None:
    """Raises DataError for an answer that the reward cannot compare with."""
    if not compares_answers(settings):
        return
    if answer is None:
        raise DataError(f"there is no answer (null), which reward.type={settings.type} compares with")
    if isinstance(settings, NumericReward):
        number_of_answer(answer)
    elif isinstance(settings, MathReward):
        formula_of_answer(answer)
    elif not answer.strip():
        raise DataError(f"the answer {answer!r} is empty, so reward.type={settings.type} has nothing to compare with")


def check_answers(settings: Reward, prompts: Iterable[Prompt], *, source: str) -> None:
    """Raises DataError, with the row, for the first answer that the reward cannot compare with.

    `source` says where the prompts come from, as `data.train.jsonl_files='a.jsonl'`.
    """
    for prompt in prompts:
        try:
            check_answer(settings, prompt.answer)
        except DataError as error:
            raise DataError(
                f"{source}: row {prompt.index} (counted from 0 over all files), column {settings.answer_key!r}: "
                f"{error}; correct or leave out the row, or set reward.answer_key or reward.type"
            ) from None
