"""Calls of a user's own code, which can neither end the run without an error nor block it for ever.

Exceptions are code in C that ignores signals, code that ends the process (`os._exit`), and code that uses SIGALRM
itself, such as math-verify by default: its time is compared when it returns.
"""

import importlib
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, TypeVar

from nemo_opd.config.secrets import without_secrets
from nemo_opd.errors import ConfigError

T = TypeVar("T")
LARGEST_REWARD = 1e15
_MESSAGE_LENGTH = 500
"""Characters of an error's message that are shown."""
TEXT_S = 5.0
_AGAIN_S = 1.0
"""Time between interruptions of code that handles the first one as an error."""


class UsersCodeError(Exception):
    """Failure of the user's code; the message completes a sentence about it: `raised …`, or `did not return …`."""


class _Overdue(BaseException):
    """Interruption of the user's code; no Exception, so that code which handles all of those does not handle it."""


def called(function: Callable[..., T], *arguments: Any, timeout_s: float, key: str) -> T:
    """Return what the function returns.

    key: setting of `timeout_s`. Raises UsersCodeError for whatever the function raises, SystemExit too, and where it
    takes longer than `timeout_s`. KeyboardInterrupt passes.

    The main thread is interrupted by an alarm, in waiting calls and regular expressions too. In another thread the
    function is called in one more, which is abandoned when its time is up.
    """
    try:
        return _limited(function, arguments, timeout_s)
    except KeyboardInterrupt:
        raise
    except _Overdue:
        raise UsersCodeError(f"did not return in {timeout_s:g} s ({key})") from None
    except BaseException as error:
        raise UsersCodeError(f"raised {_described(error)}") from error


def imported(reference: str, *, key: str, form: str) -> Any:
    """Import what `package.module:name` names, from the working folder too.

    key: setting. form: its form, for messages. Raises ConfigError where it cannot be imported.
    """
    module, _, name = reference.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an import may raise anything, and call sys.exit
        raise ConfigError(
            f"{key}={reference}: cannot be imported ({_described(error)}); give `{form}`, with the package "
            "installed or in the working folder"
        ) from error


def shown(value: object) -> str:
    """Return a short text of a value that the code returned."""
    written = " ".join(_safely(repr, value).split())
    return written if len(written) <= 80 else written[:77] + "..."


def _safely(text_of: Callable[[object], str], value: object) -> str:
    """Return the value's text, without secrets; its type where the text is made by user's code that fails or takes
    longer than `TEXT_S`.
    """
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
    """Return whether statistics of rewards, squares included, can be computed with a number."""
    return is_finite(value) and abs(value) <= LARGEST_REWARD


def _described(error: BaseException) -> str:
    """Return type, message and place of an error in a user's code, in one line."""
    message = " ".join(_safely(str, error).split())[:_MESSAGE_LENGTH]
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' if message else ''}{message}{at}"


def _limited(function: Callable[..., T], arguments: tuple[Any, ...], timeout_s: float) -> T:
    by = _by_alarm if threading.current_thread() is threading.main_thread() else _in_a_thread
    return by(function, arguments, timeout_s)


def _by_alarm(function: Callable[..., T], arguments: tuple[Any, ...], timeout_s: float) -> T:
    """Raise _Overdue in the function when the time is up; an alarm that was set before is kept.

    It is one function and not a context manager because an alarm can ring between any two lines: unless `is_inside` it
    does nothing, and inside what it raises passes the `finally`.
    """
    is_inside = False

    def ring(*_: object) -> None:
        if is_inside:
            raise _Overdue

    start = time.monotonic()
    rest = interval = 0.0
    handler = signal.signal(signal.SIGALRM, ring)
    try:
        rest, interval = signal.setitimer(signal.ITIMER_REAL, timeout_s, _AGAIN_S)
        is_inside = True
        result = function(*arguments)
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if rest:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, rest - (time.monotonic() - start)), interval)
    if time.monotonic() - start > timeout_s:
        raise _Overdue
    return result


def _in_a_thread(function: Callable[..., T], arguments: tuple[Any, ...], timeout_s: float) -> T:
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function(*arguments))
        except BaseException as error:
            outcome.set_exception(error)

    # The end of the process does not wait for a daemon.
    threading.Thread(target=run, name="user's code", daemon=True).start()
    try:
        return outcome.result(timeout_s)
    except FutureTimeoutError:  # the code may raise the same
        if outcome.done():
            raise
        raise _Overdue from None
