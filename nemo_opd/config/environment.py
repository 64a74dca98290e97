"""Environments that answer the student between its turns."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_opd.config.base import YEAR_S, Settings


class EnvironmentBase(Settings):
    max_turns: int = Field(4, ge=1)
    """Maximum turns of the student in one rollout."""
    max_response_tokens: int = Field(256, ge=1)
    """Maximum tokens of the environment between two turns; longer answers are cut and marked as cut."""
    call_timeout_s: float = Field(300, gt=0, le=YEAR_S)
    """Seconds for one answer; an environment that takes longer ends the run."""


class CalculatorEnvironment(EnvironmentBase):
    """An environment that answers calls of an arithmetic tool."""

    type: Literal["calculator"] = "calculator"


class FunctionEnvironment(EnvironmentBase):
    """Your own Environment (nemo_opd.rollout.environment), `package.module:Class`, created for each rollout."""

    type: Literal["function"] = "function"
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:Class`."""


Environment = Annotated[CalculatorEnvironment | FunctionEnvironment, Field(discriminator="type")]
