"""Callbacks: user code in the training loop."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_opd.errors import CallbackError, ConfigError
from nemo_opd.users_code import imported, shown

_FORM = "package.module:name"
_KEY = "run.callbacks"
_METHODS = ("on_step", "on_save", "on_evaluate")


class Callback:
    """Base class of callbacks, which run in the driver, in order. Any object with one of these methods qualifies."""

    def on_step(self, step: int, record: Mapping[str, float]) -> bool | None:
        """Receive the logged metrics of a step; return True to end the run after it, with a checkpoint."""

    def on_save(self, step: int, folder: Path) -> None:
        """Receive a complete checkpoint; `folder/student` loads with transformers."""

    def on_evaluate(self, step: int, values: Mapping[str, float]) -> None:
        """Receive val/* and eval/* when measured, before the step's `on_step`. Step 0 precedes training."""


class Callbacks:
    """All callbacks of a run: first the ones named in the settings, then the ones passed from Python."""

    def __init__(self, names: Sequence[str], objects: Sequence[Any] = ()) -> None:
        """Import and instantiate the callbacks; a class is called without arguments.

        Raises ConfigError for an object that cannot be imported or is not a callback, and CallbackError if a class
        raises.
        """
        self._all = [(name, _instantiated(name, item)) for name, item in import_callbacks(names).items()]
        for item in objects:
            _require_callback(f"callbacks={shown(item)}", item)
            name = getattr(item, "__name__", type(item).__name__)
            self._all.append((f"{name} of callbacks", _instantiated(name, item)))

    def on_step(self, step: int, record: Mapping[str, float]) -> bool:
        """Return whether a callback ends the run. Raises CallbackError, like the other methods."""
        measured = {key: value for key, value in record.items() if key.startswith(("val/", "eval/"))}
        if measured:
            self._call("on_evaluate", step, measured)
        return any(answer is True for answer in self._call("on_step", step, record))

    def on_start(self, record: Mapping[str, float]) -> None:
        self._call("on_evaluate", 0, record)

    def on_save(self, step: int, folder: Path) -> None:
        self._call("on_save", step, folder)

    def _call(self, method: str, step: int, payload: Any) -> list[Any]:
        methods = [(name, getattr(callback, method, None)) for name, callback in self._all]
        return [_called(f"{name}: {method}", call, step, payload) for name, call in methods if call is not None]


def import_callbacks(names: Sequence[str]) -> dict[str, Any]:
    """Import the callbacks named in the settings. Raises ConfigError for an object that is not a callback."""
    objects = {name: imported(name, key=_KEY, form=_FORM) for name in names}
    for name, item in objects.items():
        _require_callback(f"{_KEY}={name}", item)
    return objects


def _require_callback(label: str, item: Any) -> None:
    if not _has_methods(item) and (isinstance(item, type) or not callable(item)):
        raise ConfigError(f"{label}: neither a function nor a class with {', '.join(_METHODS[:-1])} or {_METHODS[-1]}")


def _has_methods(item: Any) -> bool:
    return any(hasattr(item, method) for method in _METHODS)


def _instantiated(name: str, item: Any) -> Any:
    """Return an object with the methods. A class is instantiated; a function becomes `on_step`."""
    if isinstance(item, type):
        return _called(name, item)
    if _has_methods(item):
        return item
    callback = Callback()
    callback.on_step = item  # type: ignore[method-assign]
    return callback


def _called(label: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        failure = CallbackError(f"{label} raised {type(error).__name__}: {error}; correct it, or leave it out")
        failure.add_note(traceback.format_exc())
        raise failure from None
