"""Graceful interruption of a run by signals."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals sent by Ctrl-C, a scheduler, and a closed terminal."""
_ANSWER = "ending after this step; interrupt again to end now"
ECHO_S = 1.0
"""Window of duplicate signals: timeout(1) signals a process and its group, and `uv run` forwards signals."""


class SignalDebouncer:
    """Filter of duplicate signals within `ECHO_S`."""

    def __init__(self) -> None:
        self._last = -math.inf

    def is_one(self) -> bool:
        now = time.monotonic()
        if now - self._last < ECHO_S:
            return True
        self._last = now
        return False


_echoes = SignalDebouncer()
_was_requested = threading.Event()


def was_requested() -> bool:
    """Return whether a signal has asked any run in this process to end."""
    return _was_requested.is_set()


class Interrupt:
    """Signal handler: the first signal sets `requested`, the second raises KeyboardInterrupt."""

    def __init__(self, answer: Callable[[str], None]) -> None:
        """Store `answer`, which shows a text to the user and is called from a separate thread."""
        self.requested = False
        self._answer = answer

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if _echoes.is_one():
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        _was_requested.set()
        # In a thread, because the signal may have interrupted a write to the same stream.
        threading.Thread(target=self._answer, args=(_ANSWER,), daemon=True).start()

    def __enter__(self) -> Self:
        self._previous = _handle(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._previous)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on each of the signals, so that resources are closed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _echoes.is_one():
            raise KeyboardInterrupt

    previous = _handle(interrupt)
    try:
        yield
    finally:
        _restore(previous)


def _handle(handler: Callable[[int, FrameType | None], Any]) -> dict[signal.Signals, Any]:
    """Install a handler, except for signals that are ignored (nohup), and return the previous handlers."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    previous = {number: installed for number, installed in handlers.items() if installed is not signal.SIG_IGN}
    for number in previous:
        signal.signal(number, handler)
    return previous


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
