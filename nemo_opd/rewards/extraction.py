"""Extraction of the answer from a response, by each `extract.type`."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from nemo_opd.config.extraction import AnswerLine, Boxed, Choice, Extraction, Json, LastTurn, Regex
from nemo_opd.errors import ConfigError
from nemo_opd.rewards.boxes import last_boxed
from nemo_opd.users_code import UsersCodeError, called

Extractor = Callable[[str], str | None]
"""Map from a response to the answer in it; None where there is none."""

_EMPHASIS = " \t*_`$"
_MAX_JSON = 1000
"""Places in a response at which JSON is looked for."""


def build_extractor(settings: Extraction) -> Extractor:
    """Return the extractor. Raises ConfigError for a schema that cannot be read."""
    if isinstance(settings, LastTurn):
        return str.strip
    if isinstance(settings, Boxed):
        return last_boxed
    if isinstance(settings, AnswerLine):
        return partial(_after, re.compile(rf"{re.escape(settings.marker)}[{_EMPHASIS}]*([^\n]*)", re.IGNORECASE))
    if isinstance(settings, Choice):
        return partial(_chosen, _choice_patterns(settings.letters))
    if isinstance(settings, Regex):
        return partial(_matched, re.compile(settings.pattern, re.MULTILINE), settings.timeout_s)
    return partial(_json_value, settings.key, _validator(settings))


def _after(pattern: re.Pattern[str], text: str) -> str | None:
    found = [match[1].strip().rstrip(".").strip(_EMPHASIS) for match in pattern.finditer(text)]
    return (found[-1] or None) if found else None


def _choice_patterns(letters: str) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of a chosen letter, the surest first."""
    letter = f"([{letters}])"
    return (
        re.compile(rf"(?i:answer|choice|option)(?i:\s+is)?\s*:?[{_EMPHASIS}]*\(?{letter}\b(?!')"),
        re.compile(rf"\({letter}\)|(?<![\w'])[*_]*{letter}[*_]*(?=[.):]|\s*$)", re.MULTILINE),
    )


def _chosen(patterns: tuple[re.Pattern[str], ...], text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None and (named := re.search(r"[A-Z](?![A-Za-z])", boxed)):
        return named[0]
    for pattern in patterns:
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
    value = next(_json_from_the_end(text), None)
    if value is None or (validator is not None and not validator.is_valid(value)):
        return None
    for part in key.split(".") if key else ():
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return None
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _json_from_the_end(text: str) -> Iterator[Any]:
    """Yield the outermost objects and lists, the last first."""
    decoder, found, start = json.JSONDecoder(), [], 0
    for place in [match.start() for match in re.finditer(r"[{\[]", text)][:_MAX_JSON]:
        if place < start:
            continue
        try:
            value, start = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        found.append(value)
    yield from reversed(found)
