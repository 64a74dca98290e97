"""Stopping a run from outside without losing it."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What Ctrl-C, a scheduler and a closed terminal send."""
ANSWER = "ending after this step; once more: now"
ECHO_S = 1.0
"""timeout(1) sends its signal to a process and to all of its group, and `uv run` passes on what it gets."""


class Echoes:
    """Tells a signal that repeats one of the last `ECHO_S` from one that a person sends."""

    def __init__(self) -> None:
        self._last = -math.inf

    def is_one(self) -> bool:
        now = time.monotonic()
        if now - self._last < ECHO_S:
            return True
        self._last = now
        return False


_echoes = Echoes()
_was_requested = threading.Event()


def was_requested() -> bool:
    """Return whether a person or a scheduler has asked to end, also where that run has ended since."""
    return _was_requested.is_set()


class Interrupt:
    """While active, the first signal only sets `requested`; a second one raises KeyboardInterrupt."""

    def __init__(self, answer: Callable[[str], None]) -> None:
        """answer: shows a text to the person who sent the signal; called from a thread of its own."""
        self.requested = False
        self._answer = answer

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if _echoes.is_one():
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        _was_requested.set()
        # Not from here: the signal may have come in the middle of writing to the same stream.
        threading.Thread(target=self._answer, args=(ANSWER,), daemon=True).start()

    def __enter__(self) -> Self:
        self._previous = handle(self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        restore(self._previous)


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, each of the signals raises KeyboardInterrupt, so that what is open is closed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _echoes.is_one():
            raise KeyboardInterrupt

    previous = handle(interrupt)
    try:
        yield
    finally:
        restore(previous)


def handle(handler: Callable[[int, FrameType | None], Any]) -> dict[signal.Signals, Any]:
    """Install a handler of the signals, but for those that are ignored, as under nohup; the handlers before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heeded = {number: each for number, each in before.items() if each is not signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, handler)
    return heeded


def restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
