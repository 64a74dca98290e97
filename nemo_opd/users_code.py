"""Calls of a user's own code, which can neither end the run silently nor block it indefinitely, and callbacks of a run.

Exceptions to this are C code that ignores signals, code that ends the process (`os._exit`), and code that uses SIGALRM
itself, such as math-verify by default: its time is checked when it returns.
"""

import importlib
import math
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from nemo_opd.errors import CallbackError, ConfigError

_T = TypeVar("_T")
LARGEST_REWARD = 1e15
"""Largest absolute value of a reward; statistics square it."""
_MESSAGE_LENGTH = 500
"""Maximum characters of an error message that are shown."""
TEXT_S = 5.0
"""Seconds to make the text of a value or an error."""
_AGAIN_S = 1.0
"""Time between further interruptions of code that handled the first one as an error."""
_CALLBACK_FORM = "package.module:name"
_CALLBACKS_KEY = "run.callbacks"
_CALLBACK_METHODS = ("on_step", "on_save", "on_evaluate")


class UsersCodeError(Exception):
    """Failure of the user's code; the message completes a sentence about it: `raised …`, or `did not return …`."""


class _Overdue(BaseException):
    """Interruption of the user's code; a BaseException, so that `except Exception` does not catch it."""


def called(function: Callable[..., _T], *arguments: Any, timeout_s: float, key: str) -> _T:
    """Call the function and return its result.

    key: setting of `timeout_s`. Raises UsersCodeError if the function raises anything, SystemExit included, or takes
    longer than `timeout_s`. KeyboardInterrupt passes.

    In the main thread an alarm interrupts the function, even in waiting calls and regular expressions. In another
    thread the function runs in a helper thread, which is abandoned when its time is up.
    """
    try:
        return _limited(function, arguments, timeout_s)
    except KeyboardInterrupt:
        raise
    except _Overdue:
        raise UsersCodeError(f"did not return in {timeout_s:g} s ({key})") from None
    except BaseException as error:
        raise UsersCodeError(f"raised {_described(error)}") from error


def _limited(function: Callable[..., _T], arguments: tuple[Any, ...], timeout_s: float) -> _T:
    call = _with_alarm if threading.current_thread() is threading.main_thread() else _in_thread
    return call(function, arguments, timeout_s)


def _with_alarm(function: Callable[..., _T], arguments: tuple[Any, ...], timeout_s: float) -> _T:
    """Raise _Overdue in the function when the time is up; a previously set alarm is restored.

    This is one function, not a context manager, because an alarm can ring between any two lines: it does nothing unless
    `is_inside`, and an error it raises inside passes the `finally`.
    """
    is_inside = False

    def ring(*_: object) -> None:
        if is_inside:
            raise _Overdue

    start = time.monotonic()
    remaining = interval = 0.0
    handler = signal.signal(signal.SIGALRM, ring)
    try:
        remaining, interval = signal.setitimer(signal.ITIMER_REAL, timeout_s, _AGAIN_S)
        is_inside = True
        result = function(*arguments)
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, remaining - (time.monotonic() - start)), interval)
    if time.monotonic() - start > timeout_s:
        raise _Overdue
    return result


def _in_thread(function: Callable[..., _T], arguments: tuple[Any, ...], timeout_s: float) -> _T:
    helper: _Helper = vars(_idle).pop("helper", None) or _Helper()  # a nested call takes another one
    outcome = helper.submit(function, arguments)
    try:
        return outcome.result(timeout_s)
    except FutureTimeoutError:  # the code may raise this error too
        if outcome.done():
            raise
        raise _Overdue from None
    finally:
        if outcome.done():
            _idle.helper = helper
        del helper  # an error keeps this frame


class _Helper:
    """A thread that makes calls for one other thread, since starting one takes longer than many calls. It ends with
    this object, and is abandoned in a call that does not return.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        # The process does not wait for daemon threads at exit.
        threading.Thread(target=_make_calls, args=(self._calls,), daemon=True).start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, function: Callable[..., _T], arguments: tuple[Any, ...]) -> Future[_T]:
        outcome: Future[_T] = Future()
        self._calls.put((outcome, function, arguments))
        return outcome


_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


def _make_calls(calls: SimpleQueue[_Call | None]) -> None:
    thread = threading.current_thread()
    while (call := calls.get()) is not None:
        outcome, function, arguments = call
        thread.name = "user's code"
        try:
            settle = partial(outcome.set_result, function(*arguments))
        except BaseException as error:
            settle = partial(outcome.set_exception, error)
        thread.name = "no user's code"
        settle()
        del call, outcome, function, arguments, settle  # an idle thread holds nothing of the user's


_idle = threading.local()
"""The `helper` of each thread, between its calls."""


def imported(reference: str, *, key: str, form: str) -> Any:
    """Import the object named by `package.module:name`, also from the working folder.

    key: name of the setting. form: its form, for messages. Raises ConfigError if it cannot be imported.
    """
    module, _, name = reference.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an import may raise any error, or call sys.exit
        raise ConfigError(
            f"{key}={reference}: cannot be imported ({_described(error)}); give `{form}`, with the package "
            "installed or in the working folder"
        ) from error


def _described(error: BaseException) -> str:
    """Return type, message and place of an error in the user's code, in one line."""
    message = " ".join(_safely(str, error).split())[:_MESSAGE_LENGTH]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in (__file__, importlib.__file__) and not frame.filename.startswith("<frozen importlib")
    ]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' if message else ''}{message}{place}"


def shown(value: object) -> str:
    """Return a short text for a value that the user's code returned."""
    text = " ".join(_safely(repr, value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _safely(text_of: Callable[[object], str], value: object) -> str:
    """Return the value's text without secrets, or its type if making the text fails or takes longer than `TEXT_S`.

    Making the text may run the user's code.
    """
    from nemo_opd.config.secrets import without_secrets  # imports pydantic

    try:
        return without_secrets(_limited(text_of, (value,), TEXT_S))
    except KeyboardInterrupt:
        raise
    except BaseException:
        return type(value).__name__


def is_finite(value: Any) -> bool:
    """Return whether a number is finite as a float."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an int of hundreds of digits
        return False


def is_reward(value: Any) -> bool:
    """Return whether a number can be used in statistics of rewards, which square it."""
    return is_finite(value) and abs(value) <= LARGEST_REWARD


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
        return [_call_callback(f"{name}: {method}", call, step, payload) for name, call in methods if call is not None]


def import_callbacks(names: Sequence[str]) -> dict[str, Any]:
    """Import the callbacks named in the settings. Raises ConfigError for an object that is not a callback."""
    objects = {name: imported(name, key=_CALLBACKS_KEY, form=_CALLBACK_FORM) for name in names}
    for name, item in objects.items():
        _require_callback(f"{_CALLBACKS_KEY}={name}", item)
    return objects


def _require_callback(label: str, item: Any) -> None:
    if not _has_methods(item) and (isinstance(item, type) or not callable(item)):
        raise ConfigError(
            f"{label}: neither a function nor a class with {', '.join(_CALLBACK_METHODS[:-1])} or "
            f"{_CALLBACK_METHODS[-1]}"
        )


def _has_methods(item: Any) -> bool:
    return any(hasattr(item, method) for method in _CALLBACK_METHODS)


def _instantiated(name: str, item: Any) -> Any:
    """Return an object with the methods. A class is instantiated; a function becomes `on_step`."""
    if isinstance(item, type):
        return _call_callback(name, item)
    if _has_methods(item):
        return item
    callback = Callback()
    callback.on_step = item  # type: ignore[method-assign]
    return callback


def _call_callback(label: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        failure = CallbackError(f"{label} raised {type(error).__name__}: {error}; correct it, or leave it out")
        failure.add_note(traceback.format_exc())
        raise failure from None
