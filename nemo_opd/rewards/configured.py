"""Rewards by `reward.type`, and checks of a dataset's answers."""

import inspect
from collections.abc import Iterable, Mapping, Sequence

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
from nemo_opd.config.settings import choices, require_lines
from nemo_opd.data.row_types import Prompt, Rollout
from nemo_opd.errors import ConfigError, DataError, RolloutError
from nemo_opd.rewards.code import CodePasses
from nemo_opd.rewards.extraction import ExactMatch, FormatMatch
from nemo_opd.rewards.math import MathMatch
from nemo_opd.rewards.numeric import NumericMatch
from nemo_opd.rewards.reward_function import Compound, RewardFunction
from nemo_opd.users_code import UsersCodeError, called, imported


class _WeightedSum(Compound):
    """The weighted sum of several rewards. The first part with votes provides the votes."""

    def __init__(self, settings: WeightedReward, parts: Sequence[RewardFunction]) -> None:
        super().__init__(settings, parts)
        self._weights = [term.weight for term in settings.terms]
        self._voter = next((part for part in parts if part.votes), None)

    def score(self, rollout: Rollout) -> float:
        return sum(weight * part(rollout) for weight, part in zip(self._weights, self.rewards, strict=True))

    def expect(self, rollouts: Sequence[Rollout]) -> None:
        for part in self.rewards:
            part.expect(rollouts)

    def vote(self, rollout: Rollout) -> str | None:
        return None if self._voter is None else self._voter.vote(rollout)


class _RewardBySource(Compound):
    """A compound reward that uses the part for the rollout's source."""

    def __init__(self, settings: SourceReward, by_source: Mapping[str, RewardFunction]) -> None:
        super().__init__(settings, tuple(by_source.values()))
        self._key, self._by_source = settings.key, by_source

    def score(self, rollout: Rollout) -> float:
        """Return the reward. Raises RolloutError for a source without one."""
        return self._part(rollout)(rollout)

    def expect(self, rollouts: Sequence[Rollout]) -> None:
        for reward in self.rewards:
            reward.expect([rollout for rollout in rollouts if self._part(rollout) is reward])

    def vote(self, rollout: Rollout) -> str | None:
        return self._part(rollout).vote(rollout)

    def _part(self, rollout: Rollout) -> RewardFunction:
        source = str(rollout.prompt.row.get(self._key))
        part = self._by_source.get(source) or self._by_source.get("default")
        if part is None:
            raise RolloutError(f"{self.at(rollout)}: {self._key}={source!r} has no reward; add it under reward.rewards")
        return part


class _UserFunction(RewardFunction):
    """A reward computed by the function at `package.module:function`."""

    def __init__(self, settings: FunctionReward) -> None:
        """Import the function. Raises ConfigError if it cannot be imported, or cannot be called with only a rollout."""
        super().__init__(settings)
        self.name = settings.function
        self._timeout_s = settings.call_timeout_s
        self._function = imported(self.name, key="reward.function", form="package.module:function")
        if not callable(self._function):
            raise ConfigError(f"reward.function={self.name}: it is a {type(self._function).__name__}; name a function")
        self._require_one_argument()

    def score(self, rollout: Rollout) -> float:
        """Call the function. Raises RolloutError if it raises or does not return in time."""
        try:
            return called(self._function, rollout, timeout_s=self._timeout_s, key="reward.call_timeout_s")
        except UsersCodeError as error:
            raise RolloutError(f"{self.at(rollout)}: it {error}") from error

    def _require_one_argument(self) -> None:
        try:
            signature = inspect.signature(self._function)
        except (TypeError, ValueError):  # many C functions have no signature
            return
        try:
            signature.bind(None)
        except TypeError as error:
            raise ConfigError(
                f"reward.function={self.name}: it is called with a Rollout and nothing else, but it takes {signature} "
                f"({error}); give the other parameters defaults"
            ) from None


class _EnvironmentPay(RewardFunction):
    """The sum of the environment's rewards over all turns."""

    def score(self, rollout: Rollout) -> float:
        if rollout.env_reward is None:
            raise RolloutError(
                f"{self.at(rollout)}: the run has no environment; set `environment`, or another reward.type"
            )
        return rollout.env_reward


REWARDS: dict[type[RewardBase], type[RewardFunction]] = {
    ExactReward: ExactMatch,
    NumericReward: NumericMatch,
    MathReward: MathMatch,
    CodeReward: CodePasses,
    EnvironmentReward: _EnvironmentPay,
    FunctionReward: _UserFunction,
    FormatReward: FormatMatch,
}
"""Settings → reward, without compound rewards, which `build_reward` creates."""
require_lines(choices(Reward), {*REWARDS, WeightedReward, SourceReward}, "REWARDS in nemo_opd/rewards/configured.py")


def build_reward(settings: RewardBase) -> RewardFunction:
    """Build a reward, to be used in a `with`. Raises ConfigError with the key for an unusable function, JSON schema or
    sandbox.
    """
    if isinstance(settings, WeightedReward):
        parts = [_build_part(f"terms.{i}.reward", term.reward) for i, term in enumerate(settings.terms)]
        return _WeightedSum(settings, parts)
    if isinstance(settings, SourceReward):
        by_source = {source: _build_part(f"rewards.{source}", part) for source, part in settings.rewards.items()}
        return _RewardBySource(settings, by_source)
    return REWARDS[type(settings)](settings)


def _build_part(path: str, settings: RewardBase) -> RewardFunction:
    """Build a part of a compound reward. Raises ConfigError with the part's key."""
    try:
        return build_reward(settings)
    except ConfigError as error:
        raise ConfigError(f"reward.{path}.{str(error).removeprefix('reward.')}") from error


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


def check_answer(settings: RewardBase, answer: str | None) -> None:
    """Raise DataError if the reward cannot compare with this answer."""
    for part in settings.parts:
        if not isinstance(part, AnswerReward):
            continue
        if answer is None:
            raise DataError(f"there is no answer (null) for reward.type={part.type} to compare with")
        REWARDS[type(part)].check_answer(answer)
