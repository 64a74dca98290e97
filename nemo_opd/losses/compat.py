"""Parity with other systems, for people who come from them (methods.md §5.11).

A preset reproduces the formula of a system, with that system's defaults for what is not given. Units, the shift, masks
and normalizers stay those of this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from nemo_opd.errors import ConfigError

_Value = TypeVar("_Value")


def check_compat(compat: str | None, systems: Sequence[str]) -> None:
    """Raise ConfigError for a system that a loss has no preset of."""
    if compat is not None and compat not in systems:
        raise ConfigError(f"compat={compat!r}: this loss has no such preset; choose from {', '.join(systems)}, or none")


def fixed_by(compat: str | None, key: str, given: _Value | None, preset: _Value, default: _Value) -> _Value:
    """Return the preset's value with `compat`, else what is given, else the default.

    Raises ConfigError for another value than the preset's.
    """
    if compat is None:
        return default if given is None else given
    if given is not None and given != preset:
        raise ConfigError(f"{key}={given} is not what compat={compat} computes; leave {key} out, or compat")
    return preset
