"""Rewards of rollouts."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_opd.config.base import YEAR_S, Settings
from nemo_opd.config.sandbox import SandboxSettings


class RewardBase(Settings):
    answer_key: str | None = None
    """The column that becomes the prompt's `answer`; null: prompts have none."""
    weighting_beta: float | None = Field(None, gt=0)
    """Weigh the distillation of a rollout by n · softmax(reward / beta) among its prompt's (methods.md §10.3)."""


class AnswerReward(RewardBase):
    answer_key: str = "answer"
    """The column that holds what is compared with."""


class ExactReward(AnswerReward):
    """1 where the last turn is the answer, else 0; surrounding white space aside."""

    type: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""


class NumericReward(AnswerReward):
    """1 where the last number of the last turn is the answer within a relative tolerance, else 0."""

    type: Literal["numeric"] = "numeric"
    tolerance: float = Field(1e-6, ge=0)
    """Largest difference from the answer, as a share of its absolute value."""


class MathReward(AnswerReward):
    """1 where the last \\boxed{…} of the last turn is mathematically equal to the answer, else 0."""

    type: Literal["math"] = "math"
    timeout_s: float = Field(5, gt=0, le=YEAR_S)
    """Processor time for one comparison, in seconds; one that takes longer counts as unequal."""


class CodeReward(AnswerReward):
    """1 where the Python program of the last turn passes the row's tests in a sandbox, else 0 (docs/sandbox.md)."""

    type: Literal["code"] = "code"
    answer_key: str = "test"
    """The column with the tests: code, or pairs of input and output (docs/sandbox.md)."""
    sandbox: SandboxSettings = Field(default_factory=SandboxSettings)
    """Limits of a program, and how it is kept apart."""


class EnvironmentReward(RewardBase):
    """The reward that the environment gave."""

    type: Literal["environment"] = "environment"


class FunctionReward(RewardBase):
    """Your own: `package.module:function`, called with a Rollout (nemo_opd.data.record), returns a number."""

    type: Literal["function"] = "function"
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`."""
    call_timeout_s: float = Field(300, gt=0, le=YEAR_S)
    """Seconds for one rollout; a function that takes longer ends the run."""


Reward = Annotated[
    ExactReward | NumericReward | MathReward | CodeReward | EnvironmentReward | FunctionReward,
    Field(discriminator="type"),
]
