"""Environment that answers the student between its turns."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_opd.config.base import YEAR_S, Settings


class EnvironmentBase(Settings):
    max_turns: int = Field(4, ge=1)
    """Maximal turns of the student in one rollout."""
    max_response_tokens: int = Field(256, ge=1)
    """Maximal tokens of the environment between two turns; a longer answer is cut, and a mark added."""
    call_timeout_s: float = Field(300, gt=0, le=YEAR_S)
    """Seconds for one answer; an environment that takes longer ends the run."""


class CalculatorEnvironment(EnvironmentBase):
    """Answers calls of a tool that evaluates arithmetic."""

    type: Literal["calculator"] = "calculator"


class FunctionEnvironment(EnvironmentBase):
    """Your own: `package.module:Class`, an Environment (nemo_opd.rollout.environment), made anew for each rollout."""

    type: Literal["function"] = "function"
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:Class`."""


Environment = Annotated[CalculatorEnvironment | FunctionEnvironment, Field(discriminator="type")]
