"""Rewards of rollouts: the extraction of answers, the sandbox of programs, and the rewards themselves."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from nemo_opd.config.settings import YEAR_S, FilePath, Frozen, MayChange, Settings, UsersCode


class LastTurn(Settings):
    """All of the last turn."""

    type: Literal["last_turn"] = "last_turn"


class Boxed(Settings):
    """The content of the last \\boxed{…}."""

    type: Literal["boxed"] = "boxed"


class AnswerLine(Settings):
    """Text from the last `Answer:` to the end of its line."""

    type: Literal["answer_line"] = "answer_line"
    marker: str = "Answer:"
    """Text before the answer, matched in upper or lower case."""


class Choice(Settings):
    """The letter of a multiple choice: the last \\boxed{…}, otherwise the last letter named as the answer, otherwise
    the last one that stands alone.
    """

    type: Literal["choice"] = "choice"
    letters: str = Field("ABCDEFGHIJ", pattern=r"^[A-Z]{2,26}$")
    """Letters of the choices."""


class Regex(Settings):
    """The last match of a regular expression: its first group, or the whole match if it has no group."""

    type: Literal["regex"] = "regex"
    pattern: str
    """Regular expression of Python's `re`; ^ and $ match at line ends."""
    timeout_s: MayChange[float] = Field(5, gt=0, le=3600)
    """Seconds for one response; after that nothing is extracted."""

    @field_validator("pattern")
    @classmethod
    def the_pattern_can_be_read(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}; correct it") from error
        return value


class Json(Settings):
    """A value of the last JSON object or list, if it matches a JSON schema."""

    type: Literal["json"] = "json"
    schema_file: FilePath | None = None
    """A file with the JSON schema; by default any JSON matches."""
    key: str | None = None
    """Path of the value, such as `answer` or `steps.0.result`; by default all of it, as JSON with sorted keys."""
    timeout_s: MayChange[float] = Field(5, gt=0, le=3600)
    """Seconds to compare one response with the schema; after that nothing is extracted."""


Extraction = Annotated[LastTurn | Boxed | AnswerLine | Choice | Regex | Json, Field(discriminator="type")]


Isolation = Literal["bubblewrap", "namespaces", "none"]


class SandboxSettings(Settings):
    """Limits of the programs that a reward runs."""

    isolation: MayChange[Literal["auto", "bubblewrap", "namespaces", "none"]] = "auto"
    """Kind of sandbox: bubblewrap, or Linux namespaces without it; auto: the first of the two that works. none: limits
    of time and memory, and otherwise everything that you may do; only for programs that you trust.
    """
    timeout_s: float = Field(5, gt=0, le=3600)
    """Processor time of a program with all its processes, in seconds; waiting programs have four times as long."""
    memory_mb: int = Field(1024, ge=64)
    """MiB of memory for a program with all its processes."""
    processes: int = Field(16, ge=1)
    """Processes and threads of a program."""
    scratch_mb: int = Field(16, ge=1)
    """MiB of /tmp, the only folder that a program can write to, and of a single file."""
    output_kb: int = Field(1024, ge=1)
    """KiB that a program may print."""
    workers: MayChange[int | None] = Field(None, ge=1)
    """Programs that run at the same time; by default one for each core that this process may use."""

    @field_validator("isolation", mode="before")
    @classmethod
    def process_is_removed(cls, value: object) -> object:
        if value == "process":
            raise ValueError(
                "it is removed, as programs could get around it; write auto, and allow namespaces if this machine "
                "forbids them (docs/sandbox.md), or none for programs that you trust"
            )
        return value


class RewardBase(Settings):
    weighting_beta: float | None = Field(None, gt=0)
    """Weight a rollout's distillation by n · softmax(reward / beta) among its prompt's rollouts (methods.md §10.3)."""

    @property
    def parts(self) -> "tuple[SingleReward, ...]":
        """Rewards that this one combines; only itself for most."""
        raise NotImplementedError

    @property
    def answer_column(self) -> str | None:
        """The column that becomes the prompt's `answer`; None if prompts have none."""
        return next((part.answer_key for part in self.parts if part.answer_key is not None), None)

    @property
    def named_columns(self) -> Mapping[str, str]:
        """More columns that each row must have, with the key (relative to the reward) that names them."""
        return {}


class SingleReward(RewardBase):
    type: str
    answer_key: str | None = None
    """The column that becomes the prompt's `answer`, or null if prompts have none."""

    @property
    def parts(self) -> "tuple[SingleReward, ...]":
        return (self,)


class AnswerReward(SingleReward):
    answer_key: str = "answer"
    """The column with the answer that a response is compared with."""


class ExtractedReward(AnswerReward):
    extract: Extraction = Field(default_factory=LastTurn)
    """Part of the last turn that is compared; if it is not found, the reward is 0."""


class ExactReward(ExtractedReward):
    """1 if the last turn is the answer, otherwise 0; surrounding white space is ignored."""

    type: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Ignore upper and lower case."""


class NumericReward(ExtractedReward):
    """1 if the last number of the last turn equals the answer within a relative tolerance, otherwise 0."""

    type: Literal["numeric"] = "numeric"
    tolerance: float = Field(1e-6, ge=0)
    """Largest difference from the answer, as a share of its absolute value."""


class MathReward(ExtractedReward):
    """1 if the last \\boxed{…} of the last turn is mathematically equal to the answer, otherwise 0."""

    type: Literal["math"] = "math"
    extract: Extraction = Field(default_factory=Boxed)
    """Part of the last turn that is compared; if it is not found, the reward is 0."""
    timeout_s: float = Field(5, gt=0, le=YEAR_S)
    """Processor time for one comparison, in seconds; a longer one counts as unequal."""


class CodeReward(AnswerReward):
    """1 if the Python program of the last turn passes the row's tests, otherwise 0 (docs/sandbox.md)."""

    type: Literal["code"] = "code"
    answer_key: str = "test"
    """The column with the tests: code, or pairs of input and output (docs/sandbox.md)."""
    entry_point_key: str | None = None
    """The column with the name of the tested function, such as HumanEval's `entry_point`; by default the last function
    in the question.
    """
    sandbox: SandboxSettings = Field(default_factory=SandboxSettings)
    """Limits and isolation of the program."""

    @property
    def named_columns(self) -> Mapping[str, str]:
        return {} if self.entry_point_key is None else {self.entry_point_key: "entry_point_key"}


class EnvironmentReward(SingleReward):
    """The reward that the environment gave."""

    type: Literal["environment"] = "environment"


class FunctionReward(SingleReward):
    """Your own function, called with a Rollout (nemo_opd.rollout.record); returns a number. `rollout.prompt.row` has
    all columns of the row.
    """

    type: Literal["function"] = "function"
    function: UsersCode
    """`package.module:function`."""
    call_timeout_s: MayChange[float] = Field(300, gt=0, le=YEAR_S)
    """Seconds for one rollout; a function that takes longer ends the run."""


class FormatReward(SingleReward):
    """1 if the last turn has the wanted form, otherwise 0: the form is what `extract` finds."""

    type: Literal["format"] = "format"
    extract: Extraction
    """The form: an extraction that finds nothing in texts without it, such as `{type: boxed}`."""


_Single = ExactReward | NumericReward | MathReward | CodeReward | EnvironmentReward | FunctionReward | FormatReward
_OneReward = Annotated[_Single, Field(discriminator="type")]


class _CompoundReward(RewardBase):
    @model_validator(mode="after")
    def parts_score_one_answer_together(self) -> Self:
        keys = sorted({part.answer_key for part in self.parts if part.answer_key is not None})
        if len(keys) > 1:
            raise ValueError(
                f"its parts compare with the columns {' and '.join(keys)}, but a prompt has one answer; give all parts "
                "the same answer_key"
            )
        if any(part.weighting_beta is not None for part in self.parts):
            raise ValueError("weighting_beta of a part has no effect; write it next to type, for the whole reward")
        return self


def _below(parts: Iterable[tuple[str, RewardBase]]) -> dict[str, str]:
    """Return the columns that parts name, with their keys relative to the whole reward."""
    return {column: f"{path}.{key}" for path, part in parts for column, key in part.named_columns.items()}


class WeightedPart(Settings):
    """Term of a weighted sum of rewards."""

    weight: float = 1.0
    """Factor of this reward in the sum; may be negative."""
    reward: _OneReward
    """The reward."""


class WeightedReward(_CompoundReward):
    """A weighted sum of rewards, such as one for the answer and one for its form."""

    type: Literal["weighted"] = "weighted"
    terms: tuple[WeightedPart, ...] = Field(min_length=1)
    """The rewards with their weights. maj@k uses the votes of the first reward that has votes."""

    @property
    def parts(self) -> tuple[SingleReward, ...]:
        return tuple(part.reward for part in self.terms)

    @property
    def named_columns(self) -> Mapping[str, str]:
        return _below((f"terms.{i}.reward", term.reward) for i, term in enumerate(self.terms))


class SourceReward(_CompoundReward):
    """The reward that a column of the row selects, for data from several sources."""

    type: Literal["by_source"] = "by_source"
    key: str = "data_source"
    """The column with the name of the row's source."""
    rewards: Frozen[str, Annotated[_OneReward | WeightedReward, Field(discriminator="type")]] = Field(min_length=1)
    """Rewards by name of the source. `default` is for names that are not listed; without it they are refused."""

    @property
    def parts(self) -> tuple[SingleReward, ...]:
        return tuple(part for reward in self.rewards.values() for part in reward.parts)

    @property
    def named_columns(self) -> Mapping[str, str]:
        parts = ((f"rewards.{source}", reward) for source, reward in self.rewards.items())
        return {**_below(parts), self.key: "key"}

    def of(self, source: str) -> "_OneReward | WeightedReward":
        """Return a source's reward. Raises KeyError if it has none."""
        return self.rewards.get(source) or self.rewards["default"]


Reward = Annotated[_Single | WeightedReward | SourceReward, Field(discriminator="type")]


def is_paid_by_environment(reward: RewardBase) -> bool:
    """Return whether the environment determines the reward or a part of it."""
    return any(isinstance(part, EnvironmentReward) for part in reward.parts)


def calls_users_code(reward: RewardBase) -> bool:
    """Return whether the reward or a part of it is a user's function."""
    return any(isinstance(part, FunctionReward) for part in reward.parts)
