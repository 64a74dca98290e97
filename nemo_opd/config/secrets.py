"""What of a configuration is not for everybody's eyes, and how it is written instead.

Secret are values of `rollout.environment` (but plain numbers and switches), of options such as `--api-key`, credentials
in addresses, and what `${oc.env:NAME}` stood for. The last is written as it was, which is enough to repeat a run; the
others are masked, so that whoever repeats it gives them again.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from nemo_opd.errors import ConfigError

MASK = "***"
WORDS = r"(?:key|token|password|passwd|secret|credentials?|auth|signature|sig)"
NAME = rf"(?:[A-Za-z0-9_.-]*[_.-])?{WORDS}"
"""Of what ends with such a word: HF_TOKEN and --api-key, but neither --tokenizer nor --max-num-batched-tokens."""
SECRET_NAME = re.compile(rf"-*{NAME}", re.IGNORECASE)
OPTION = re.compile(rf"(-+{NAME})=(.+)", re.IGNORECASE | re.DOTALL)
HARMLESS = re.compile(r"[\d.,:+-]{1,16}|true|false|yes|no|on|off", re.IGNORECASE)
USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")
QUERY = re.compile(rf"(?<=[?&])({NAME})=[^&\s#'\"]+", re.IGNORECASE)
REFERENCE, FROM_ENVIRONMENT = re.compile(r"\$\{"), re.compile(r"\$\{oc\.env:")
SHORTEST = 6
"""Characters of a value that is looked for in any text; a shorter one would be found where it is not meant."""
ENVIRONMENT, ARGUMENTS = "environment", ("options", "command")
"""Keys of a server's section."""

Path = tuple[str | int, ...]
_known: dict[str, str] = {}
"""What is shown for a value wherever it is."""
_references: dict[Path, tuple[str, str]] = {}
"""By path, a value and the reference by which it was written."""


def remember(raw: Any, resolved: Any) -> None:
    """Take note of the secrets of a composed configuration, before and after its references are resolved.

    `without_secrets` and `shown_config` know them from now on, in this process.
    """
    texts = [(path, value, at(raw, path)) for path, value in leaves(resolved) if isinstance(value, str)]
    direct = {value: written for _, value, written in texts if is_reference(written, FROM_ENVIRONMENT)}
    _known.update(direct)
    for path, value, written in texts:
        if is_reference(written, REFERENCE) and any(each in value for each in direct):
            _references[path] = value, written
        elif (masked := masked_leaf(resolved, path, value)) == MASK:
            _known[value] = MASK
        elif masked != value and (option := OPTION.fullmatch(value)):
            _known[option[2]] = MASK


def is_reference(written: object, pattern: re.Pattern[str]) -> TypeGuard[str]:
    return isinstance(written, str) and pattern.search(written) is not None


def without_secrets(text: str) -> str:
    """A text for people, such as an error, without the secrets that are known and without credentials in addresses."""
    for value in sorted(_known, key=len, reverse=True):
        if len(value) >= SHORTEST:
            text = text.replace(value, _known[value])
    return in_addresses(text)


def shown_config(settings: Any) -> Any:
    """Plain data of a configuration as it may be written."""
    return changed(settings, lambda path, value: _reference(path, value) or masked_leaf(settings, path, value))


def require_values(settings: Any) -> None:
    """Raise ConfigError where a value is the mask of one, as in the config.yaml of a run that had it."""
    for path, value in leaves(settings):
        if isinstance(value, str) and (value == MASK or f"://{MASK}@" in value or f"={MASK}" in value):
            key = ".".join(map(str, path))
            raise ConfigError(
                f"{key}={value}: a secret that was masked when the file was written; write {key}=VALUE, or "
                f"{key}='${{oc.env:NAME}}' to have it read from the environment, which is kept as it is"
            )


def _reference(path: Path, value: str) -> str | None:
    """How the value was written where it came from the environment."""
    known, written = _references.get(path, (None, None))
    return written if known == value else None


def masked_leaf(settings: Any, path: Path, value: str) -> str:
    """One value of a configuration; MASK where nothing of it may be shown."""
    *parent, last = path
    section = parent[-1] if len(parent) > 1 else None
    if section == ENVIRONMENT:
        is_plain = HARMLESS.fullmatch(value) and not SECRET_NAME.fullmatch(str(last))
        return value if is_plain else MASK
    if section in ARGUMENTS and isinstance(last, int):
        before = at(settings, (*parent, last - 1)) if last else None
        if isinstance(before, str) and before.startswith("-") and SECRET_NAME.fullmatch(before):
            return MASK
        value = OPTION.sub(rf"\1={MASK}", value)
    return in_addresses(value)


def in_addresses(text: str) -> str:
    return QUERY.sub(rf"\1={MASK}", USER.sub(MASK, text))


def leaves(settings: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Path and value of all that is no group."""
    items = settings.items() if isinstance(settings, dict) else enumerate(settings) if is_list(settings) else None
    if items is None:
        yield path, settings
        return
    for key, value in items:
        yield from leaves(value, (*path, key))


def changed(settings: Any, change: Callable[[Path, str], str], path: Path = ()) -> Any:
    """A copy with each text changed."""
    if isinstance(settings, dict):
        return {key: changed(value, change, (*path, key)) for key, value in settings.items()}
    if is_list(settings):
        return [changed(value, change, (*path, i)) for i, value in enumerate(settings)]
    return change(path, settings) if isinstance(settings, str) else settings


def at(settings: Any, path: Path) -> Any:
    """None where there is nothing of its own, as below a reference to a whole group."""
    for part in path:
        try:
            settings = settings[part]
        except (KeyError, IndexError, TypeError):
            return None
    return settings


def is_list(value: object) -> bool:
    return isinstance(value, list | tuple)
