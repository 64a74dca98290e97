"""A word now and then from a process that would otherwise be silent."""

import threading
import time
from collections.abc import Callable
from typing import Self

EARLY = 0.9
"""Of the interval: a busy machine wakes threads late."""


class Ticker:
    """Calls `say` before each `interval_s` of silence is over, in a thread of its own, until it is closed.

    Where nobody can read any more it ends itself, and the next `touch` raises why.
    """

    def __init__(self, say: Callable[[], None], interval_s: float) -> None:
        self._say, self._interval_s = say, EARLY * interval_s
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self.touch()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Begin the interval anew, because something is said. Raises what `say` has raised."""
        if self._failure is not None:
            raise self._failure
        self._due = time.monotonic() + self._interval_s

    def _run(self) -> None:
        while not self._closed.wait(max(0.0, self._due - time.monotonic())):
            if time.monotonic() < self._due:
                continue
            self.touch()
            try:
                self._say()
            # rich answers a closed pipe by SystemExit
            except (OSError, ValueError, SystemExit) as error:
                self._failure = error
                return

    def close(self) -> None:
        """Returns when nothing is being said any more."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
