"""A user's own code, called so that it neither ends the run without a word nor keeps it for ever.

Beyond that is code that looks at no signal, in C, that ends the process (`os._exit`), or that has SIGALRM for itself,
as math-verify by default: its time is compared when it returns.
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
SHOWN = 500
"""Characters of an error's own message."""
TEXT_S = 5.0
AGAIN_S = 1.0
"""From one interruption to the next, of code that takes the first for an error of its own."""


class UsersCodeError(Exception):
    """What the code did, for a sentence about it: `raised …`, or `did not return …`."""


class _Overdue(BaseException):
    """Raised inside the user's code; no Exception, lest it be handled there."""


def called(function: Callable[..., T], *arguments: Any, timeout_s: float, key: str) -> T:
    """Return what the function returns.

    Raises UsersCodeError for all that it raises, SystemExit too, and where it takes longer than `timeout_s`, which the
    setting `key` is. KeyboardInterrupt is the person's and passes.

    The main thread is interrupted by an alarm, in waiting calls and regular expressions too. From another thread the
    function is called in one more, which is left to itself when its time is up.
    """
    try:
        return _limited(function, arguments, timeout_s)
    except KeyboardInterrupt:
        raise
    except _Overdue:
        raise UsersCodeError(f"did not return in {timeout_s:g} s ({key})") from None
    except BaseException as error:
        raise UsersCodeError(f"raised {described(error)}") from error


def imported(reference: str, *, key: str, form: str) -> Any:
    """What `package.module:name` names; the working folder is looked in too.

    key: of the setting; form: how it is written, for messages. Raises ConfigError where it cannot be imported.
    """
    module, _, name = reference.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # what a module raises when imported shares no base class, and it may call sys.exit
        raise ConfigError(
            f"{key}={reference}: cannot be imported ({described(error)}); give `{form}`, with the package "
            "installed or in the working folder"
        ) from error


def shown(value: object) -> str:
    """What the code returned, in a few words."""
    written = " ".join(safely(repr, value).split())
    return written if len(written) <= 80 else written[:77] + "..."


def safely(text_of: Callable[[object], str], value: object) -> str:
    """Return what the value says of itself, without secrets; its type where that is the user's code too, and fails or
    takes longer than `TEXT_S`.
    """
    try:
        return without_secrets(_limited(text_of, (value,), TEXT_S))
    except KeyboardInterrupt:
        raise
    except BaseException:
        return type(value).__name__


def is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an int of hundreds of digits
        return False


def is_reward(value: Any) -> bool:
    """Whether a number is one that statistics of rewards can be computed of, their squares included."""
    return is_finite(value) and abs(value) <= LARGEST_REWARD


def described(error: BaseException) -> str:
    """Type, message and place of an error in a user's code, in one line."""
    said = " ".join(safely(str, error).split())[:SHOWN]
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' if said else ''}{said}{at}"


def _limited(function: Callable[..., T], arguments: tuple[Any, ...], timeout_s: float) -> T:
    by = _by_alarm if threading.current_thread() is threading.main_thread() else _in_a_thread
    return by(function, arguments, timeout_s)


def _by_alarm(function: Callable[..., T], arguments: tuple[Any, ...], timeout_s: float) -> T:
    """Raise _Overdue in the function when the time is up; an alarm that was set before is kept.

    It is one function, and no context manager, for an alarm can ring between any two lines: outside of `is_inside` it
    does nothing, and within it what it raises passes the `finally`.
    """
    is_inside = False

    def ring(*_: object) -> None:
        if is_inside:
            raise _Overdue

    start = time.monotonic()
    rest = interval = 0.0
    handler = signal.signal(signal.SIGALRM, ring)
    try:
        rest, interval = signal.setitimer(signal.ITIMER_REAL, timeout_s, AGAIN_S)
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

    # Nobody waits for a daemon at the end of the process.
    threading.Thread(target=run, name="user's code", daemon=True).start()
    try:
        return outcome.result(timeout_s)
    except FutureTimeoutError:  # the code may raise the same of its own
        if outcome.done():
            raise
        raise _Overdue from None
