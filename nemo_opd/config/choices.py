"""Choices of discriminated unions, and checks that tables of code cover them."""

from collections.abc import Container, Iterable
from typing import Any, get_args

from nemo_opd.config.base import Settings


def choices(union: Any) -> tuple[type[Settings], ...]:
    """Return the settings classes of a discriminated union."""
    classes: tuple[type[Settings], ...] = get_args(get_args(union)[0])
    return classes


def require_lines(needed: Iterable[str | type[Settings]], table: Container[Any], name: str) -> None:
    """Raise NotImplementedError if choices have no entry in a table. Called when the table's module is imported.

    name: the table's name and file, for the message.
    """
    missing = [choice if isinstance(choice, str) else choice.__name__ for choice in needed if choice not in table]
    if missing:
        raise NotImplementedError(f"{name} has no line for {', '.join(missing)}; add it (docs/extending.md)")
