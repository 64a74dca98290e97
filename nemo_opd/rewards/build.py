"""The reward of each `reward.type`, and checks of a dataset's answers."""

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
"""Settings → reward that is made of no others; those that are, are made in `build_reward`."""
require_lines(choices(Reward), {*REWARDS, WeightedReward, SourceReward}, "REWARDS in nemo_opd/rewards/build.py")


def build_reward(settings: RewardBase) -> RewardFunction:
    """Return the reward, to be closed by `with`. Raises ConfigError, with its key, for what cannot be
    made: a user's function, a JSON schema, a sandbox.
    """
    if isinstance(settings, WeightedReward):
        parts = [_build_below(f"terms.{i}.reward", term.reward) for i, term in enumerate(settings.terms)]
        return WeightedSum(settings, parts)
    if isinstance(settings, SourceReward):
        by_source = {source: _build_below(f"rewards.{source}", each) for source, each in settings.rewards.items()}
        return RewardBySource(settings, by_source)
    return REWARDS[type(settings)](settings)


def _build_below(path: str, settings: RewardBase) -> RewardFunction:
    """Return a part of a reward. Raises ConfigError with its key in place of the whole reward's."""
    try:
        return build_reward(settings)
    except ConfigError as error:
        raise ConfigError(f"reward.{path}.{str(error).removeprefix('reward.')}") from error


def check_answer(settings: RewardBase, answer: str | None) -> None:
    """Raise DataError for an answer that the reward cannot compare with."""
    for part in settings.parts:
        if not isinstance(part, AnswerReward):
            continue
        if answer is None:
            raise DataError(f"there is no answer (null), which reward.type={part.type} compares with")
        REWARDS[type(part)].check_answer(answer)


def _chosen(settings: Reward, prompt: Prompt) -> RewardBase:
    """Return the reward of a prompt. Raises DataError where its source has none."""
    if not isinstance(settings, SourceReward):
        return settings
    source = str(prompt.row.get(settings.key))
    try:
        return settings.of(source)
    except KeyError:
        known = ", ".join(settings.rewards)
        raise DataError(
            f"{settings.key}={source!r} has no reward (there are {known}); add it, or one of the name default, under "
            "reward.rewards"
        ) from None


def check_answers(settings: Reward, prompts: Iterable[Prompt], *, source: str) -> None:
    """Raise DataError, with the row, for the first answer that the reward cannot compare with.

    source: the setting that the prompts come from, such as `data.train.jsonl_files='a.jsonl'`.
    """
    column = "" if settings.answer_column is None else f"column {settings.answer_column!r}: "
    for prompt in prompts:
        try:
            check_answer(_chosen(settings, prompt), prompt.answer)
        except DataError as error:
            raise DataError(
                f"{source}: row {prompt.index} (counted from 0 over all files): {column}"
                f"{error}; correct or leave out the row, or set reward.answer_key or reward.type"
            ) from None
