"""The reward of each `reward.type`, and checks of a dataset's answers."""

from collections.abc import Iterable

from nemo_opd.config.reward import (
    AnswerReward,
    CodeReward,
    EnvironmentReward,
    ExactReward,
    FunctionReward,
    MathReward,
    NumericReward,
    Reward,
    RewardBase,
)
from nemo_opd.data.record import Prompt
from nemo_opd.errors import DataError
from nemo_opd.rewards.base import RewardFunction
from nemo_opd.rewards.code import CodePasses
from nemo_opd.rewards.environment import EnvironmentPay
from nemo_opd.rewards.exact import ExactMatch
from nemo_opd.rewards.function import UserFunction
from nemo_opd.rewards.math import MathMatch
from nemo_opd.rewards.numeric import NumericMatch

REWARDS: dict[type[RewardBase], type[RewardFunction]] = {
    ExactReward: ExactMatch,
    NumericReward: NumericMatch,
    MathReward: MathMatch,
    CodeReward: CodePasses,
    EnvironmentReward: EnvironmentPay,
    FunctionReward: UserFunction,
}
"""Settings → reward. A test holds that every `reward.type` is here."""


def build_reward(settings: Reward) -> RewardFunction:
    """Return the reward, to be closed by `with`. Raises ConfigError where a user's function cannot be imported."""
    return REWARDS[type(settings)](settings)


def compares_answers(settings: Reward) -> bool:
    """Return whether every prompt needs an answer."""
    return isinstance(settings, AnswerReward)


def check_answer(settings: Reward, answer: str | None) -> None:
    """Raise DataError for an answer that the reward cannot compare with."""
    if not compares_answers(settings):
        return
    if answer is None:
        raise DataError(f"there is no answer (null), which reward.type={settings.type} compares with")
    REWARDS[type(settings)].check_answer(answer)


def check_answers(settings: Reward, prompts: Iterable[Prompt], *, source: str) -> None:
    """Raise DataError, with the row, for the first answer that the reward cannot compare with.

    source: the setting that the prompts come from, such as `data.train.jsonl_files='a.jsonl'`.
    """
    for prompt in prompts:
        try:
            check_answer(settings, prompt.answer)
        except DataError as error:
            raise DataError(
                f"{source}: row {prompt.index} (counted from 0 over all files), column {settings.answer_key!r}: "
                f"{error}; correct or leave out the row, or set reward.answer_key or reward.type"
            ) from None
