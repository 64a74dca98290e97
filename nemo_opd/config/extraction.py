"""Extraction of the answer from a response."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from nemo_opd.config.base import Settings


class LastTurn(Settings):
    """The whole last turn."""

    type: Literal["last_turn"] = "last_turn"


class Boxed(Settings):
    """The content of the last \\boxed{…}."""

    type: Literal["boxed"] = "boxed"


class AnswerLine(Settings):
    """Text after the last `Answer:`, to the end of its line; bold and a full stop at the end are left out."""

    type: Literal["answer_line"] = "answer_line"
    marker: str = "Answer:"
    """Text before the answer, in upper or lower case."""


class Choice(Settings):
    """The letter of a multiple choice: that of the last \\boxed{…}, else the last one that is named as the answer, else
    the last one that stands alone, in brackets or before a full stop or bracket.
    """

    type: Literal["choice"] = "choice"
    letters: str = Field("ABCDEFGHIJ", pattern=r"^[A-Z]{2,26}$")
    """Letters of the choices."""


class Regex(Settings):
    """The last match of a regular expression: its first group, or all of it where it has no group."""

    type: Literal["regex"] = "regex"
    pattern: str
    """Regular expression of Python's `re`; ^ and $ match at lines."""
    timeout_s: float = Field(5, gt=0, le=3600)
    """Seconds for one response; beyond it nothing is found."""

    @field_validator("pattern")
    @classmethod
    def the_pattern_can_be_read(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}; correct it") from error
        return value


class Json(Settings):
    """A value of the last JSON object or list, bare or in a fenced block, where that matches a JSON schema."""

    type: Literal["json"] = "json"
    schema_file: Path | None = None
    """A file with the JSON schema; null: any JSON will do."""
    key: str | None = None
    """The value by its path, such as `answer` or `steps.0.result`; null: all of it, as JSON with sorted keys."""


Extraction = Annotated[LastTurn | Boxed | AnswerLine | Choice | Regex | Json, Field(discriminator="type")]
