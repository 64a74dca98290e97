"""Masking of secrets in a configuration.

Secrets are the values of `rollout.environment` except plain numbers and switches, the values of options such as
`--api-key`, a teacher's `api_key`, credentials in addresses, and values read through `${oc.env:NAME}`. Such a reference
is written back as it was, which is enough to repeat a run; other secrets are masked and must be given again.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, TypeGuard

from nemo_opd.errors import ConfigError

MASK = "***"
_WORDS = r"(?:api_?key|key|token|password|passwd|secret|credentials?|auth|signature|sig)"
NAME = rf"(?:[A-Za-z0-9_.-]*[_.-])?{_WORDS}"
"""Pattern of names that end with such a word: HF_TOKEN and --api-key, but not --tokenizer or --max-num-batched-tokens.
"""
_SECRET_NAME = re.compile(rf"-*{NAME}", re.IGNORECASE)
_HARMLESS = re.compile(r"[\d.,:+-]{1,16}|true|false|yes|no|on|off", re.IGNORECASE)
_IN_ADDRESSES = (
    # A password may contain @ and, wrongly, a slash; host:port/path@v1 is not a password.
    re.compile(r"(?<=://)(?P<secret>[^/\s?#\"')]+|[^/\s@:\"')]+:(?!\d+/)[^\s\"')]+)(?=@)"),
    re.compile(rf"(?<=[?&]){NAME}=(?P<secret>[^&\s#'\"]+)", re.IGNORECASE),
)
_IN_ARGUMENTS = (
    re.compile(rf"^-+{NAME}=(?P<secret>.+)$", re.IGNORECASE | re.DOTALL),
    # In a shell command, a header or JSON.
    re.compile(rf"(?:^|(?<=[\s;&|\"']))-*{NAME}=[\"']?(?P<secret>[^\s\"';&|]+)", re.IGNORECASE),
    re.compile(rf"(?<![\w-])-+{NAME}\s+[\"']?(?P<secret>[^\s\"']+)", re.IGNORECASE),
    re.compile(rf"\b{NAME}[\"']?\s*:\s*[\"']?(?P<secret>[^\s\"',}}]+)", re.IGNORECASE),
    re.compile(r"\b(?:bearer|authorization\W+basic)\s+(?P<secret>[^\s'\"]+)", re.IGNORECASE),
    *_IN_ADDRESSES,
)
_REFERENCE, FROM_ENVIRONMENT = re.compile(r"\$\{"), re.compile(r"\$\{oc\.env:(\w+)")
_SHORTEST, _SHORTEST_ELSEWHERE = 6, 12
"""Fewest characters of a secret, and of an environment variable's value outside secret fields, that are masked in any
text; shorter ones would match by chance.
"""
_ENVIRONMENT, _ARGUMENTS = "environment", ("options", "command")
"""Keys of a server's section."""
_API_KEY, _SERVED = "api_key", "served"
"""Key of a served teacher, and the section that its keys are moved to once its tokenizer is known."""
_PROBE = "what-is-secret"
"""Placeholder that stands for a secret in tests of the masking."""

_KeyPath = tuple[str | int, ...]
_replacements: dict[str, str] = {}
"""Replacement texts, by secret value."""
_references: dict[_KeyPath, tuple[str, str]] = {}
"""Values and the references they came from, by path."""


def remember(raw: Any, resolved: Any) -> None:
    """Store the secrets of a composed configuration for `without_secrets` and `shown_config` in this process.

    raw, resolved: the configuration before and after references are resolved.
    """
    texts = [(path, value, _value_at(raw, path)) for path, value in leaves(resolved) if isinstance(value, str)]
    from_environment = {value for _, value, written in texts if value and is_reference(written, FROM_ENVIRONMENT)}
    for path, value, written in texts:
        if is_reference(written, _REFERENCE) and any(secret in value for secret in from_environment):
            _references[path] = value, written
        masked = masked_leaf(resolved, path, value)
        if masked == MASK:
            if path[-2] in _ARGUMENTS or _SECRET_NAME.fullmatch(str(path[-1])) or _looks_secret(value):
                _replacements.setdefault(value, MASK)
        elif masked != value:
            _replacements.update(dict.fromkeys(_secrets_in(value, _IN_ARGUMENTS), MASK))
        if isinstance(written, str):
            _replacements.update(_variable_references(written, is_secret=masked != value))


def _variable_references(written: str, *, is_secret: bool) -> dict[str, str]:
    """Return the values of a text's environment variables and the references that replace them in other texts.

    is_secret: whether the text is in a secret field. Elsewhere short values and paths are not secrets.
    """
    values = {name: os.environ.get(name, "") for name in FROM_ENVIRONMENT.findall(written)}
    return {
        value: f"${{oc.env:{name}}}" for name, value in values.items() if value and (is_secret or _looks_secret(value))
    }


def _looks_secret(value: str) -> bool:
    """Return whether a value looks like a secret by itself: it is long and not a path."""
    return len(value) >= _SHORTEST_ELSEWHERE and "/" not in value


def is_reference(written: object, pattern: re.Pattern[str]) -> TypeGuard[str]:
    return isinstance(written, str) and pattern.search(written) is not None


def without_secrets(text: str) -> str:
    """Mask known secrets, and credentials in addresses, in a text such as an error message."""
    for value in sorted(_replacements, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, _replacements[value])
    return _masked_text(text, _IN_ADDRESSES)


def shown_config(settings: Any) -> Any:
    """Return a configuration's plain data with secrets masked."""
    return _changed(settings, lambda path, value: _reference(path, value) or masked_leaf(settings, path, value))


def require_values(settings: Any) -> None:
    """Raise ConfigError if a value is a mask, as in the config.yaml of a run that had a secret there."""
    for path, value in leaves(settings):
        if isinstance(value, str) and _is_masked(settings, path, value):
            key = ".".join(map(str, path))
            raise ConfigError(
                f"{key}={value}: a secret that was masked when the file was written; write {key}=VALUE, or "
                f"{key}='${{oc.env:NAME}}' to read it from the environment, which is written as it is"
            )


def _is_masked(settings: Any, path: _KeyPath, value: str) -> bool:
    """Return whether masking produced this value; a mask in another place is ordinary text."""
    return MASK in value and masked_leaf(settings, path, value.replace(MASK, _PROBE)) == value


def _reference(path: _KeyPath, value: str) -> str | None:
    """Return the environment reference that a value was written as, even if validation changed the value.

    Validation normalizes paths and makes lists of single values.
    """
    as_typed = tuple(part for part in path if part != _SERVED)
    for candidate in (path, path[:-1], as_typed, as_typed[:-1]):
        resolved, written = _references.get(candidate, (None, None))
        if resolved is not None and PurePath(resolved) == PurePath(value):
            return written
    return None


def masked_leaf(settings: Any, path: _KeyPath, value: str) -> str:
    """Return a value with its secrets masked; MASK if all of it is secret."""
    *parent, last = path
    section = parent[-1] if len(parent) > 1 else None
    if last == _API_KEY:
        return MASK
    if section == _ENVIRONMENT:
        is_plain = _HARMLESS.fullmatch(value) and not _SECRET_NAME.fullmatch(str(last))
        return value if is_plain else MASK
    if section in _ARGUMENTS and isinstance(last, int):
        if not value.startswith("-") and _is_secret_option(_value_at(settings, tuple(parent)), last):
            return MASK
        return _masked_text(value, _IN_ARGUMENTS)
    return _masked_text(value, _IN_ADDRESSES)


def _is_secret_option(arguments: Any, index: int) -> bool:
    """Return whether an argument belongs to an option that takes one or more secrets."""
    options = [text for text in (arguments or [])[:index] if isinstance(text, str) and text.startswith("-")]
    return bool(options) and _SECRET_NAME.fullmatch(options[-1]) is not None


def _masked_text(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub(_masked_match, text)
    return text


def _masked_match(match: re.Match[str]) -> str:
    start, end = (place - match.start() for place in match.span("secret"))
    return f"{match[0][:start]}{MASK}{match[0][end:]}"


def _secrets_in(text: str, patterns: Sequence[re.Pattern[str]]) -> Iterator[str]:
    return (match["secret"] for pattern in patterns for match in pattern.finditer(text))


def leaves(settings: Any, path: _KeyPath = ()) -> Iterator[tuple[_KeyPath, Any]]:
    """Yield path and value of everything that is not a dict or list."""
    items = settings.items() if isinstance(settings, dict) else enumerate(settings) if _is_list(settings) else None
    if items is None:
        yield path, settings
        return
    for key, value in items:
        yield from leaves(value, (*path, key))


def _changed(settings: Any, change: Callable[[_KeyPath, str], str], path: _KeyPath = ()) -> Any:
    """Copy nested containers with every text changed."""
    if isinstance(settings, dict):
        return {key: _changed(value, change, (*path, key)) for key, value in settings.items()}
    if _is_list(settings):
        return [_changed(value, change, (*path, i)) for i, value in enumerate(settings)]
    return change(path, settings) if isinstance(settings, str) else settings


def _value_at(settings: Any, path: _KeyPath) -> Any:
    """Return the value at a path; None if it does not exist, as below a reference to a whole group."""
    for part in path:
        try:
            settings = settings[part]
        except (KeyError, IndexError, TypeError):
            return None
    return settings


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)
