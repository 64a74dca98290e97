"""Extraction of the answer from a response, by each `extract.type`."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from nemo_opd.config.extraction import AnswerLine, Boxed, Choice, Extraction, Json, LastTurn, Regex
from nemo_opd.errors import ConfigError, RolloutError
from nemo_opd.rewards.boxes import last_boxed
from nemo_opd.users_code import UsersCodeError, called

_Extractor = Callable[[str], str | None]
"""Map from a response to the answer in it; None where there is none. Raises RolloutError."""

_EMPHASIS = " \t*_`$"
_MAX_READ = 10_000_000
"""Characters of what looks like the beginning of JSON and is none, after which no more are read."""


def build_extractor(settings: Extraction) -> _Extractor:
    """Return the extractor. Raises ConfigError for a schema that cannot be read."""
    if isinstance(settings, LastTurn):
        return str.strip
    if isinstance(settings, Boxed):
        return last_boxed
    if isinstance(settings, AnswerLine):
        return partial(_after, re.compile(re.escape(settings.marker), re.IGNORECASE))
    if isinstance(settings, Choice):
        return partial(_chosen, _choice_patterns(settings.letters))
    if isinstance(settings, Regex):
        return partial(_matched, re.compile(settings.pattern, re.MULTILINE), settings.timeout_s)
    return partial(_json_value, settings.key, _validator(settings))


def _after(pattern: re.Pattern[str], text: str) -> str | None:
    """Return what follows the last marker in its line, without emphasis and a full stop."""
    *_, last = [None, *pattern.finditer(text)]
    if last is None:
        return None
    return text[last.end() :].partition("\n")[0].rstrip(_EMPHASIS + ".").strip(_EMPHASIS) or None


def _choice_patterns(letters: str) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of a chosen letter, the surest first: in a box, after a word such as answer, by itself."""
    letter = rf"(?<![A-Za-z])([{letters}])(?![A-Za-z'])"
    opening = rf"(?:[\s{_EMPHASIS}(\[{{]|\\(?:text|mathrm|mathbf))*+"
    # The words "I" and "A" are no choices: "the answer is I don't know", "Answer: A cat".
    by_itself = rf"(?!I\s+[a-z]|A\s+(?!because|since|as|for|and|which|not|but)[a-z]){letter}"
    return (
        re.compile(letter),
        re.compile(rf"(?i:answer|choice|option)(?i:\s++is)?+\s*+:?+{opening}{by_itself}"),
        re.compile(rf"\({letter}\)|(?<![\w'*])[*_]*+{letter}[*_]*+(?=[.):]|\s*$)", re.MULTILINE),
    )


def _chosen(patterns: tuple[re.Pattern[str], ...], text: str) -> str | None:
    boxed, *others = patterns
    if (content := last_boxed(text)) is not None and (named := boxed.search(content)):
        return named[1]
    for pattern in others:
        if found := list(pattern.finditer(text)):
            return next(group for group in found[-1].groups() if group)
    return None


def _matched(pattern: re.Pattern[str], timeout_s: float, text: str) -> str | None:
    def last() -> re.Match[str] | None:
        return next(iter(reversed(list(pattern.finditer(text)))), None)

    try:
        found = called(last, timeout_s=timeout_s, key="reward.extract.timeout_s")
    except UsersCodeError:
        return None
    return None if found is None else found[1] if pattern.groups else found[0]


def _validator(settings: Json) -> Any:
    """Return the schema's validator; None without a schema."""
    if settings.schema_file is None:
        return None
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        schema = json.loads(settings.schema_file.read_text(encoding="utf-8"))
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (OSError, ValueError, SchemaError) as error:
        reason = str(getattr(error, "message", error)).splitlines()[0]
        raise ConfigError(
            f"reward.extract.schema_file={settings.schema_file}: no JSON schema: {reason}; correct the file or the path"
        ) from error
    return kind(schema)


def _json_value(key: str | None, validator: Any, text: str) -> str | None:
    value = _last_json(text)
    if value is None or not _is_valid(value, validator):
        return None
    for part in key.split(".") if key else ():
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return None
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _is_valid(value: Any, validator: Any) -> bool:
    """Return whether a value matches the schema. Raises RolloutError for a reference in it that cannot be found."""
    if validator is None:
        return True
    from referencing.exceptions import Unresolvable

    try:
        return bool(validator.is_valid(value))
    except Unresolvable as error:
        raise RolloutError(
            f"reward.extract.schema_file: {error.ref} that it refers to cannot be found; define it in the schema itself"
        ) from error


def _last_json(text: str) -> Any:
    """Return the last object or list that is in no other; None where there is none."""
    decoder, found, end, read = json.JSONDecoder(), None, 0, 0
    for match in re.finditer(r"[{\[]", text):
        if match.start() < end:
            continue
        try:
            found, end = decoder.raw_decode(text, match.start())
        except json.JSONDecodeError as error:
            read += error.pos - match.start()
        except (ValueError, RecursionError):  # a number of too many digits, too many levels
            read += len(text) - match.start()
        if read > _MAX_READ:
            break
    return found
