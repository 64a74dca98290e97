"""Extraction of the answer from a response."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from nemo_opd.config.base import Settings


class LastTurn(Settings):
    """All of the last turn."""

    type: Literal["last_turn"] = "last_turn"


class Boxed(Settings):
    """The content of the last \\boxed{…}."""

    type: Literal["boxed"] = "boxed"


class AnswerLine(Settings):
    """Text from the last `Answer:` to the end of its line, without bold marks and a full stop at the end."""

    type: Literal["answer_line"] = "answer_line"
    marker: str = "Answer:"
    """Text before the answer, matched in upper or lower case."""


class Choice(Settings):
    """The letter of a multiple choice: the last \\boxed{…}, otherwise the last letter named as the answer, otherwise
    the last one that stands alone, in brackets or before a full stop or bracket.
    """

    type: Literal["choice"] = "choice"
    letters: str = Field("ABCDEFGHIJ", pattern=r"^[A-Z]{2,26}$")
    """Letters of the choices."""


class Regex(Settings):
    """The last match of a regular expression: its first group, or the whole match if it has no group."""

    type: Literal["regex"] = "regex"
    pattern: str
    """Regular expression of Python's `re`; ^ and $ match at line ends."""
    timeout_s: float = Field(5, gt=0, le=3600)
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
    """A value of the last JSON object or list, bare or in a fenced block, if it matches a JSON schema."""

    type: Literal["json"] = "json"
    schema_file: Path | None = None
    """A file with the JSON schema; by default any JSON matches."""
    key: str | None = None
    """Path of the value, such as `answer` or `steps.0.result`; by default all of it, as JSON with sorted keys."""


Extraction = Annotated[LastTurn | Boxed | AnswerLine | Choice | Regex | Json, Field(discriminator="type")]
