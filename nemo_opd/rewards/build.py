"""Rewards by `reward.type`, and checks of a dataset's answers."""

from collections.abc import Iterable

from nemo_opd.config.choices import choices, require_lines
from nemo_opd.config.reward import (
    AnswerReward,
    CodeReward,
    EnvironmentReward,
    ExactReward,
    FormatReward,
    FunctionReward,
    MathReward,
    NumericReward,
    Reward,
    RewardBase,
    SourceReward,
    WeightedReward,
)
from nemo_opd.data.record import Prompt
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.rewards.base import RewardFunction
from nemo_opd.rewards.by_source import RewardBySource
from nemo_opd.rewards.code import CodePasses
from nemo_opd.rewards.environment import EnvironmentPay
from nemo_opd.rewards.exact import ExactMatch
from nemo_opd.rewards.format import FormatMatch
from nemo_opd.rewards.function import UserFunction
from nemo_opd.rewards.math import MathMatch
from nemo_opd.rewards.numeric import NumericMatch
from nemo_opd.rewards.weighted import WeightedSum

REWARDS: dict[type[RewardBase], type[RewardFunction]] = {
    ExactReward: ExactMatch,
    NumericReward: NumericMatch,
    MathReward: MathMatch,
    CodeReward: CodePasses,
    EnvironmentReward: EnvironmentPay,
    FunctionReward: UserFunction,
    FormatReward: FormatMatch,
}
"""Settings → reward, without compound rewards, which `build_reward` creates."""
require_lines(choices(Reward), {*REWARDS, WeightedReward, SourceReward}, "REWARDS in nemo_opd/rewards/build.py")


def build_reward(settings: RewardBase) -> RewardFunction:
    """Build a reward, to be used in a `with`. Raises ConfigError with the key for an unusable function, JSON schema or
    sandbox.
    """
    if isinstance(settings, WeightedReward):
        parts = [_build_part(f"terms.{i}.reward", term.reward) for i, term in enumerate(settings.terms)]
        return WeightedSum(settings, parts)
    if isinstance(settings, SourceReward):
        by_source = {source: _build_part(f"rewards.{source}", part) for source, part in settings.rewards.items()}
        return RewardBySource(settings, by_source)
    return REWARDS[type(settings)](settings)


def _build_part(path: str, settings: RewardBase) -> RewardFunction:
    """Build a part of a compound reward. Raises ConfigError with the part's key."""
    try:
        return build_reward(settings)
    except ConfigError as error:
        raise ConfigError(f"reward.{path}.{str(error).removeprefix('reward.')}") from error


def check_answer(settings: RewardBase, answer: str | None) -> None:
    """Raise DataError if the reward cannot compare with this answer."""
    for part in settings.parts:
        if not isinstance(part, AnswerReward):
            continue
        if answer is None:
            raise DataError(f"there is no answer (null) for reward.type={part.type} to compare with")
        REWARDS[type(part)].check_answer(answer)


def _settings_of(settings: Reward, prompt: Prompt) -> RewardBase:
    """Return the settings of a prompt's reward. Raises DataError if its source has none."""
    if not isinstance(settings, SourceReward):
        return settings
    source = str(prompt.row.get(settings.key))
    try:
        return settings.of(source)
    except KeyError:
        sources = ", ".join(settings.rewards)
        raise DataError(
            f"{settings.key}={source!r} has no reward (there are {sources}); add it, or one named default, under "
            "reward.rewards"
        ) from None


def check_answers(settings: Reward, prompts: Iterable[Prompt], *, source: str) -> None:
    """Raise DataError, naming the row, for the first answer that the reward cannot compare with.

    source: setting that the prompts come from, such as `data.train.jsonl_files='a.jsonl'`.
    """
    column = "" if settings.answer_column is None else f"column {settings.answer_column!r}: "
    for prompt in prompts:
        try:
            check_answer(_settings_of(settings, prompt), prompt.answer)
        except DataError as error:
            raise DataError(
                f"{source}: row {prompt.index} (counted from 0 over all files): {column}"
                f"{error}; correct or leave out the row, or set reward.answer_key or reward.type"
            ) from None
