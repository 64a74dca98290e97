"""A user's own code in the loop of a run."""

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
    """Base of callbacks; any object with some of these methods is one. They are called in the driver, in order."""

    def on_step(self, step: int, record: Mapping[str, float]) -> bool | None:
        """See the metrics of a step, once they are logged; return True to end the run after it, with a checkpoint."""

    def on_save(self, step: int, folder: Path) -> None:
        """See a checkpoint, once it is whole; `folder/student` loads with transformers."""

    def on_evaluate(self, step: int, values: Mapping[str, float]) -> None:
        """See val/* and eval/* where they were measured, before the step's `on_step`; step 0 is before the first."""


class Callbacks:
    """All callbacks of a run: those that the settings name, then those given from Python."""

    def __init__(self, names: Sequence[str], given: Sequence[Any] = ()) -> None:
        """Import and make them; a class is called without arguments. Raises ConfigError for one that cannot be imported
        or is none, and CallbackError for one whose class raises.
        """
        self._all = [(name, _made(name, found)) for name, found in import_callbacks(names).items()]
        for each in given:
            _require_callback(f"callbacks={shown(each)}", each)
            name = getattr(each, "__name__", type(each).__name__)
            self._all.append((f"{name} of callbacks", _made(name, each)))

    def on_step(self, step: int, record: Mapping[str, float]) -> bool:
        """Return whether one of them ends the run. Raises CallbackError, as the others do."""
        measured = {key: value for key, value in record.items() if key.startswith(("val/", "eval/"))}
        if measured:
            self._call("on_evaluate", step, measured)
        return any(answer is True for answer in self._call("on_step", step, record))

    def on_start(self, record: Mapping[str, float]) -> None:
        self._call("on_evaluate", 0, record)

    def on_save(self, step: int, folder: Path) -> None:
        self._call("on_save", step, folder)

    def _call(self, method: str, step: int, about: Any) -> list[Any]:
        found = [(name, getattr(each, method, None)) for name, each in self._all]
        return [_called(f"{name}: {method}", call, step, about) for name, call in found if call is not None]


def import_callbacks(names: Sequence[str]) -> dict[str, Any]:
    """Return what the settings name. Raises ConfigError for what is no callback."""
    found = {name: imported(name, key=_KEY, form=_FORM) for name in names}
    for name, each in found.items():
        _require_callback(f"{_KEY}={name}", each)
    return found


def _require_callback(what: str, given: Any) -> None:
    if not _has_methods(given) and (isinstance(given, type) or not callable(given)):
        raise ConfigError(f"{what}: neither a function nor a class with {', '.join(_METHODS[:-1])} or {_METHODS[-1]}")


def _has_methods(given: Any) -> bool:
    return any(hasattr(given, method) for method in _METHODS)


def _made(name: str, given: Any) -> Any:
    """Return an object with the methods: of a class a new one; a function is called after each step."""
    if isinstance(given, type):
        return _called(name, given)
    if _has_methods(given):
        return given
    callback = Callback()
    callback.on_step = given  # type: ignore[method-assign]
    return callback


def _called(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        failure = CallbackError(f"{what} raised {type(error).__name__}: {error}; correct it, or leave it out")
        failure.add_note(traceback.format_exc())
        raise failure from None
