"""Presets that reproduce the losses of other systems (methods.md §5.11).

A preset uses a system's formula and its defaults for settings that are not set. Units, the shift, masks and normalizers
stay as in this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from nemo_opd.errors import ConfigError

_Value = TypeVar("_Value")


def check_compat(compat: str | None, systems: Sequence[str]) -> None:
    """Raise ConfigError for a system without a preset for this loss."""
    if compat is not None and compat not in systems:
        raise ConfigError(f"compat={compat!r}: this loss has no such preset; choose from {', '.join(systems)}, or None")


def fixed_by(compat: str | None, key: str, value: _Value | None, preset: _Value, default: _Value) -> _Value:
    """Return the preset's value if `compat` is set, else `value`, else the default.

    Raises ConfigError if `value` differs from the preset's.
    """
    if compat is None:
        return default if value is None else value
    if value is not None and value != preset:
        raise ConfigError(f"{key}={value} contradicts compat={compat}, which uses {preset}; leave {key} out, or compat")
    return preset
