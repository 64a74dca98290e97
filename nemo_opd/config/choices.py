"""Choices of the settings, and the tables of code for them."""

from collections.abc import Container, Iterable
from typing import Any, get_args

from nemo_opd.config.base import Settings


def choices(union: Any) -> tuple[type[Settings], ...]:
    """Return the settings that a discriminated union chooses from."""
    found: tuple[type[Settings], ...] = get_args(get_args(union)[0])
    return found


def require_lines(needed: Iterable[str | type[Settings]], table: Container[Any], name: str) -> None:
    """Raise NotImplementedError for choices without a line in a table, when the table's module is imported.

    name: of the table, and its file.
    """
    missing = [each if isinstance(each, str) else each.__name__ for each in needed if each not in table]
    if missing:
        raise NotImplementedError(f"{name} has no line for {', '.join(missing)}; add it (docs/extending.md)")
