"""Errors that a user can cause. Each also derives from the matching builtin, so `except ValueError` works.

A message says what is wrong (with the key and the value), why, and how to correct it. All of them survive pickling,
because workers raise them in other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class OPDError(Exception):
    """Base of all errors that nemo_opd raises on purpose."""


class ConfigError(OPDError, ValueError):
    """A key, a value or a combination of values that cannot work."""


class DataError(OPDError, ValueError):
    """Training or validation data that cannot be read or used."""


class ModelError(OPDError, ValueError):
    """A model folder or tokenizer that cannot be loaded or does not fit its role."""


class AlignmentError(OPDError, ValueError):
    """Token ids or tokenizers that cannot be aligned."""


class ProjectionError(OPDError, ValueError):
    """A projection matrix that is malformed or belongs to another pair of tokenizers."""


class HandoffError(OPDError, RuntimeError):
    """A teacher's output that could not be sent to the student."""


class SenderGoneError(HandoffError):
    """A teacher's output whose process has ended; that process reports the reason."""


class RolloutError(OPDError, RuntimeError):
    """A rollout engine, reward or environment that fails or returns invalid results."""


class EndpointError(OPDError, RuntimeError):
    """A teacher's server that does not answer, or answers incorrectly."""


class CheckpointError(OPDError, RuntimeError):
    """A checkpoint that is incomplete, unreadable or from another run."""


class DamagedError(CheckpointError):
    """A checkpoint with a missing or changed file."""


class StorageError(OPDError, OSError):
    """A file that cannot be written: a full disk, a quota, permissions."""


class HubError(OPDError, RuntimeError):
    """A model that could not be pushed to the Hugging Face Hub; its folder is unchanged."""


class CallbackError(OPDError, RuntimeError):
    """An exception in a user's callback, with its traceback as a note."""


class NotFiniteError(OPDError, FloatingPointError):
    """Training that produced NaN or infinity."""


class ClusterError(OPDError, RuntimeError):
    """Missing resources, or a worker that died."""


class WorkerError(ClusterError):
    """An exception inside a worker, with its group, rank and, as a note, its traceback if available."""

    def __init__(self, group: str, rank: int, error: str, traceback: str) -> None:
        super().__init__(group, rank, error, traceback)
        self.group = group
        self.rank = rank
        self.error = error
        self.traceback = traceback
        if traceback:
            self.add_note(traceback)

    def __str__(self) -> str:
        return f"{self.group} rank {self.rank} failed: {self.error}"


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigError unless the value is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{key}={value!r} is unknown; choose from {', '.join(choices)}")


def first_problem(error: ValidationError) -> str:
    """Return the first wrong key, the reason and the value."""
    problem = error.errors(include_url=False)[0]
    key, value = ".".join(map(str, problem["loc"])), repr(problem["input"])
    excerpt = value if len(value) <= 60 else f"{value[:60]}…"
    contrast = "" if problem["type"] == "missing" else f", not {excerpt}"
    reason = f"{problem['msg'][0].lower()}{problem['msg'][1:]}{contrast}"
    return f"{key}: {reason}" if key else reason


def run_all(checks: Iterable[Callable[[], object]]) -> None:
    """Run independent checks. Raises an error with a line for each OPDError, of the first one's class."""
    errors: list[OPDError] = []
    for check in checks:
        try:
            check()
        except OPDError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise type(errors[0])("\n".join(dict.fromkeys(map(str, errors)))) from errors[0]
