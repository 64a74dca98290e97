"""Extraction of the answer from a response, by `extract.type`, and the rewards that compare or require it as text."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from nemo_opd.config.reward import (
    AnswerLine,
    Boxed,
    Choice,
    ExactReward,
    Extraction,
    FormatReward,
    Json,
    LastTurn,
    Regex,
)
from nemo_opd.data.row_types import Rollout
from nemo_opd.errors import ConfigError, DataError, RolloutError
from nemo_opd.rewards.reward_function import RewardFunction, last_turn
from nemo_opd.users_code import UsersCodeError, called

_Extractor = Callable[[str], str | None]
"""Function that extracts the answer from a response, or returns None. Raises RolloutError."""
_BOX = re.compile(r"\\f?boxed\s*(?:\{|(?P<one>[0-9A-Za-z]))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_EMPHASIS = " \t*_`$"
_MAX_READ = 10_000_000
"""Characters read of invalid JSON in one response before the search stops."""


class ExactMatch(RewardFunction):
    """A reward of 1 if the texts are equal except for surrounding white space, else 0."""

    votes = True

    def __init__(self, settings: ExactReward) -> None:
        super().__init__(settings)
        self._extract = build_extractor(settings.extract)
        self._ignore_case = settings.ignore_case

    @classmethod
    def check_answer(cls, answer: str) -> None:
        if not answer.strip():
            raise DataError(f"the answer {answer!r} is empty, so reward.type=exact has nothing to compare with")

    def score(self, rollout: Rollout) -> float:
        return float(self.vote(rollout) == self._canonical(self.answer(rollout)))

    def vote(self, rollout: Rollout) -> str | None:
        return self._canonical(self._extract(last_turn(rollout)) or "") or None

    def _canonical(self, text: str) -> str:
        text = text.strip()
        return text.casefold() if self._ignore_case else text


class FormatMatch(RewardFunction):
    """A reward of 1 if the extraction succeeds, else 0."""

    def __init__(self, settings: FormatReward) -> None:
        """Build the extraction. Raises ConfigError for an unreadable schema."""
        super().__init__(settings)
        self._extract = build_extractor(settings.extract)

    def score(self, rollout: Rollout) -> float:
        return float(self._extract(last_turn(rollout)) is not None)


def build_extractor(settings: Extraction) -> _Extractor:
    """Build the extractor. Raises ConfigError for an unreadable schema."""
    if isinstance(settings, LastTurn):
        return str.strip
    if isinstance(settings, Boxed):
        return last_boxed
    if isinstance(settings, AnswerLine):
        return partial(_after, re.compile(re.escape(settings.marker), re.IGNORECASE))
    if isinstance(settings, Choice):
        return partial(_choice, _choice_patterns(settings.letters))
    if isinstance(settings, Regex):
        return partial(_last_match, re.compile(settings.pattern, re.MULTILINE), settings.timeout_s)
    return partial(_json_value, settings.key, _validator(settings))


def last_boxed(text: str) -> str | None:
    """Return the stripped content of the last box with balanced braces; None if no box is closed.

    \\boxed 5 is a box too. If boxes are nested, the outer one counts.
    """
    content, end = None, 0
    closing = _closing_braces(text)
    for box in _BOX.finditer(text):
        if box.start() < end:
            continue
        if box["one"] is not None:
            content, end = box["one"], box.end()
        elif box.end() - 1 in closing:
            end = closing[box.end() - 1]
            content = text[box.end() : end].strip()
    return content


def _closing_braces(text: str) -> dict[int, int]:
    """Return position of opening brace → position of closing brace, without escaped braces."""
    closing: dict[int, int] = {}
    open_braces: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            open_braces.append(brace.start())
        elif brace[0] == "}" and open_braces:
            closing[open_braces.pop()] = brace.start()
    return closing


def _after(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the text after the last marker in its line, without emphasis and full stop."""
    *_, last = [None, *pattern.finditer(text)]
    if last is None:
        return None
    return text[last.end() :].partition("\n")[0].rstrip(_EMPHASIS + ".").strip(_EMPHASIS) or None


def _choice_patterns(letters: str) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of a choice, most reliable first: in a box, after a word such as answer, by itself."""
    letter = rf"(?<![A-Za-z])([{letters}])(?![A-Za-z'])"
    opening = rf"(?:[\s{_EMPHASIS}(\[{{]|\\(?:text|mathrm|mathbf))*+"
    # The words "I" and "A" are not choices in "the answer is I don't know" and "Answer: A cat".
    by_itself = rf"(?!I\s+[a-z]|A\s+(?!because|since|as|for|and|which|not|but)[a-z]){letter}"
    return (
        re.compile(letter),
        re.compile(rf"(?i:answer|choice|option)(?i:\s++is)?+\s*+:?+{opening}{by_itself}"),
        re.compile(rf"\({letter}\)|(?<![\w'*])[*_]*+{letter}[*_]*+(?=[.):]|\s*$)", re.MULTILINE),
    )


def _choice(patterns: tuple[re.Pattern[str], ...], text: str) -> str | None:
    in_box, *in_text = patterns
    if (content := last_boxed(text)) is not None and (letter := in_box.search(content)):
        return letter[1]
    for pattern in in_text:
        if matches := list(pattern.finditer(text)):
            return next(group for group in matches[-1].groups() if group)
    return None


def _last_match(pattern: re.Pattern[str], timeout_s: float, text: str) -> str | None:
    def last() -> re.Match[str] | None:
        return next(iter(reversed(list(pattern.finditer(text)))), None)

    try:
        match = called(last, timeout_s=timeout_s, key="reward.extract.timeout_s")
    except UsersCodeError:
        return None
    return None if match is None else match[1] if pattern.groups else match[0]


def _validator(settings: Json) -> Callable[[Any], bool] | None:
    """Return a function that compares a value with the schema, or None without a schema."""
    if settings.schema_file is None:
        return None
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    try:
        schema = json.loads(settings.schema_file.read_text(encoding="utf-8"))
        validator_class = validator_for(schema)
        validator_class.check_schema(schema)
    except (OSError, ValueError, TypeError, RecursionError, SchemaError) as error:
        reason = str(getattr(error, "message", error)).splitlines()[0]
        raise ConfigError(
            f"reward.extract.schema_file={settings.schema_file}: not a JSON schema: {reason}; correct the file or the "
            "path"
        ) from error
    # Only the definitions of JSON schemas: by default, an unknown reference is fetched from the network.
    return partial(_is_valid, validator_class(schema, registry=REGISTRY), settings.timeout_s)


def _json_value(key: str | None, is_valid: Callable[[Any], bool] | None, text: str) -> str | None:
    value = _last_json(text)
    if value is None or (is_valid is not None and not is_valid(value)):
        return None
    for part in key.split(".") if key else ():
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return None
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _is_valid(validator: Any, timeout_s: float, value: Any) -> bool:
    """Return whether a value matches the schema in time. Raises RolloutError for a schema that cannot be applied."""
    from referencing.exceptions import Unresolvable

    try:
        return bool(called(validator.is_valid, value, timeout_s=timeout_s, key="reward.extract.timeout_s"))
    except UsersCodeError as error:
        if isinstance(error.__cause__, Unresolvable):
            raise RolloutError(
                f"reward.extract.schema_file: the reference {error.__cause__.ref} cannot be found; define it in the "
                "schema itself"
            ) from error
        if error.__cause__ is not None:
            raise RolloutError(f"reward.extract.schema_file: the schema {error}; correct it") from error
        return False


def _last_json(text: str) -> Any:
    """Return the last outermost JSON object or list, or None."""
    decoder, value, end, read = json.JSONDecoder(), None, 0, 0
    for match in re.finditer(r"[{\[]", text):
        if match.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, match.start())
        except json.JSONDecodeError as error:
            read += error.pos - match.start()
        except (ValueError, RecursionError):  # too many digits, too many levels
            read += len(text) - match.start()
        if read > _MAX_READ:
            break
    return value
