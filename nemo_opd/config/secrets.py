"""Masking of secrets in a configuration.

Secrets are the values of `rollout.environment` except plain numbers and switches, the values of options such as
`--api-key`, a teacher's `api_key`, credentials in addresses, and values read through `${oc.env:NAME}`. Such a reference
is written back as it was, which is enough to repeat a run; other secrets are masked and must be given again.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from nemo_opd.errors import ConfigError

MASK = "***"
NAME = r"(?:[A-Za-z0-9_.-]*[_.-])?(?:api_?key|key|token|password|passwd|secret|credentials?|auth|signature|sig)"
"""Pattern of names that end with such a word: HF_TOKEN and --api-key, but not --tokenizer or --max-num-batched-tokens.
"""
_SECRET_NAME = re.compile(rf"-*{NAME}", re.IGNORECASE)
_HARMLESS = re.compile(r"[\d.,:+-]{1,16}|true|false|yes|no|on|off", re.IGNORECASE)
# A match ends with its secret.
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
    re.compile(rf"\b{NAME}[\"']?\s*:\s*[\"']?(?P<secret>(?:\$\{{[^}}]*\}}|[^\s\"',}}])+)", re.IGNORECASE),
    re.compile(r"\b(?:bearer|authorization\W+basic)\s+(?P<secret>[^\s'\"]+)", re.IGNORECASE),
    *_IN_ADDRESSES,
)
_REFERENCE = re.compile(r"\$\{(?:oc\.env:)?[\w.]+\}")
_ONLY_REFERENCES = re.compile(rf"(?:{_REFERENCE.pattern})+")
_REFERRED_IN_ADDRESSES = re.compile(rf"(?:[^:$]*:)?{_ONLY_REFERENCES.pattern}")
"""A user's name may precede a password."""
_DEFAULT = re.compile(r"(?<=\$\{oc\.env:)(?P<name>\w+),[^}]*")
"""Default of a variable that is not set."""
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)")
_SHORTEST, _SHORTEST_ELSEWHERE = 6, 12
"""Fewest characters of a secret, and of an environment variable's value outside secret fields, that are masked in any
text; shorter ones would match by chance.
"""
_ARGUMENTS = ("options", "command")
"""Keys of a server's section."""

_KeyPath = tuple[str | int, ...]
_Leaves = Mapping[_KeyPath, Any]
_replacements: dict[str, str] = {}
"""Replacement texts, keyed by secret."""
_references: dict[tuple[object, ...], str] = {}
"""References to the environment, keyed by path and value, and by `_place` for values that validation moves: it makes
lists of single values, and a section of a served teacher's keys.
"""
_written: set[_KeyPath] = set()
"""Paths of all values before validation."""


def remember(raw: Any, resolved: Any) -> None:
    """Store the secrets of a composed configuration for `without_secrets` and `shown_config` in this process.

    raw, resolved: the configuration before and after references are resolved.
    """
    written, values = dict(leaves(raw)), dict(leaves(resolved))
    _written.clear()
    _written.update(values)
    texts = [(path, value, str(written.get(path))) for path, value in values.items() if isinstance(value, str)]
    from_environment = {value for _, value, text in texts if value and _FROM_ENVIRONMENT.search(text)}
    for path, value, text in texts:
        if "${" in text and any(secret in value for secret in from_environment):
            shown = _shown_reference(written, path, text)
            _references[path, PurePath(value)] = _references[_place(path, value)] = shown
        masked = masked_leaf(values, path, value)
        if masked != MASK:
            secrets = [match["secret"] for match in _matches(value, _IN_ARGUMENTS)] if masked != value else []
            _replacements.update(dict.fromkeys(secrets, MASK))
        elif {*path[-2:-1]} & {*_ARGUMENTS} or _SECRET_NAME.fullmatch(str(path[-1])) or _looks_secret(value):
            _replacements.setdefault(value, MASK)
        for name in _FROM_ENVIRONMENT.findall(text):
            variable = os.environ.get(name, "")
            if variable and (masked != value or _looks_secret(variable)):
                _replacements[variable] = f"${{oc.env:{name}}}"


def _shown_reference(written: _Leaves, path: _KeyPath, text: str) -> str:
    """Return a text with references in which literal secrets are masked."""
    masked = masked_leaf(written, path, text)
    if masked == text:
        return text
    text = _DEFAULT.sub(rf"\g<name>,{MASK}", text)
    if masked != MASK:
        for pattern in _IN_ARGUMENTS:
            text = pattern.sub(lambda match: match[0] if _is_referred_to(match) else _masked_match(match), text)
        return text
    literals = _REFERENCE.split(text)
    return "".join(
        (MASK if literal else "") + reference
        for literal, reference in zip(literals, [*_REFERENCE.findall(text), ""], strict=True)
    )


def _looks_secret(value: str) -> bool:
    """Return whether a value looks like a secret by itself: it is long and not a path."""
    return len(value) >= _SHORTEST_ELSEWHERE and "/" not in value


def is_secret_name(name: str) -> bool:
    """Return whether a variable or an option is named like a secret, such as HF_TOKEN and --api-key."""
    return _SECRET_NAME.fullmatch(name) is not None


def has_references(settings: Any) -> bool:
    """Return whether a value is read from the environment."""
    return any(isinstance(value, str) and _FROM_ENVIRONMENT.search(value) for _, value in leaves(settings))


def without_secrets(text: str) -> str:
    """Mask known secrets, and credentials in addresses, in a text such as an error message."""
    for value in sorted(_replacements, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, _replacements[value])
    return _masked_text(text, _IN_ADDRESSES)


def shown_config(settings: Any) -> Any:
    """Return a configuration's plain data with secrets masked."""
    values = dict(leaves(settings))

    def shown(path: _KeyPath, value: str) -> str:
        place = (path, PurePath(value)) if path in _written else _place(path, value)
        return _references.get(place) or masked_leaf(values, path, value)

    return _changed(settings, shown)


def contains_secret(settings: Any, path: _KeyPath) -> bool:
    """Return whether a value, or one inside of it, is a secret that is written out.

    path: its key. Of a server's environment, only variables whose names say so.
    """
    values = dict(leaves(settings, path))
    for place, value in values.items():
        if not isinstance(value, str) or MASK in value or (masked := masked_leaf(values, place, value)) == value:
            continue
        if "environment" in place and not is_secret_name(str(place[-1])):
            continue
        if masked == MASK:
            is_referred_to = _ONLY_REFERENCES.fullmatch(value) is not None
        else:
            is_referred_to = all(map(_is_referred_to, _matches(value, _IN_ARGUMENTS)))
        if not is_referred_to:
            return True
    return False


def require_values(settings: Any) -> None:
    """Raise ConfigError if a value is a mask, as in the config.yaml of a run that had a secret there."""
    values = dict(leaves(settings))
    for path, value in values.items():
        # A mask in a place that is not masked is ordinary text.
        if isinstance(value, str) and MASK in value and masked_leaf(values, path, value.replace(MASK, "x")) == value:
            key = ".".join(map(str, path))
            raise ConfigError(
                f"{key}={value}: a secret that was masked when the file was written; put it into an environment "
                f"variable and write {key}='${{oc.env:NAME}}', which is kept as it is"
            )


def _place(path: _KeyPath, value: str) -> tuple[object, ...]:
    """Return the top-level section, key and value, which are the same before and after validation."""
    return path[0], next(part for part in reversed(path) if isinstance(part, str)), PurePath(value)


def masked_leaf(values: _Leaves, path: _KeyPath, value: str) -> str:
    """Return a value with its secrets masked; MASK if all of it is secret. values: all of the configuration."""
    *parent, last = path
    section = parent[-1] if len(parent) > 1 else None
    if last == "api_key":
        return MASK
    if section == "environment":
        is_plain = _HARMLESS.fullmatch(value) and not _SECRET_NAME.fullmatch(str(last))
        return value if is_plain else MASK
    if section in _ARGUMENTS and isinstance(last, int):
        before = [str(values.get((*parent, i))) for i in range(last)]
        options = [text for text in before if text.startswith("-")]
        # An option may take several secrets.
        if options and _SECRET_NAME.fullmatch(options[-1]) and not value.startswith("-"):
            return MASK
        return _masked_text(value, _IN_ARGUMENTS)
    return _masked_text(value, _IN_ADDRESSES)


def _masked_text(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub(_masked_match, text)
    return text


def _masked_match(match: re.Match[str]) -> str:
    return match[0].removesuffix(match["secret"]) + MASK


def _is_referred_to(match: re.Match[str]) -> bool:
    """Return whether a secret is read from the environment."""
    allowed = _REFERRED_IN_ADDRESSES if match.re in _IN_ADDRESSES else _ONLY_REFERENCES
    return allowed.fullmatch(match["secret"]) is not None


def _matches(text: str, patterns: Sequence[re.Pattern[str]]) -> Iterator[re.Match[str]]:
    return (match for pattern in patterns for match in pattern.finditer(text))


def leaves(settings: Any, path: _KeyPath = ()) -> Iterator[tuple[_KeyPath, Any]]:
    """Yield path and value of everything that is not a dict or list."""
    items = _items(settings)
    if items is None:
        yield path, settings
        return
    for key, value in items:
        yield from leaves(value, (*path, key))


def _changed(settings: Any, change: Callable[[_KeyPath, str], str], path: _KeyPath = ()) -> Any:
    """Copy nested containers with every text changed."""
    if (items := _items(settings)) is None:
        return change(path, settings) if isinstance(settings, str) else settings
    changed = {key: _changed(value, change, (*path, key)) for key, value in items}
    return changed if isinstance(settings, dict) else list(changed.values())


def _items(settings: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return keys and values of a dict, indices and values of a list, and None for a single value."""
    return (
        settings.items()
        if isinstance(settings, dict)
        else enumerate(settings)
        if isinstance(settings, list | tuple)
        else None
    )
