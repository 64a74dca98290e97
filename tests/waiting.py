"""Waits for other threads and processes."""

import time
from collections.abc import Callable

ENOUGH_S = 300.0
"""Ten times the time that a healthy condition needs: the machine may be busy."""
CLEAN_S = 40.0
"""Time for processes to end: less than the minute that Ray's processes need without our help."""


def wait_until(condition: Callable[[], bool], what: str, *, every_s: float = 0.1) -> None:
    deadline = time.monotonic() + ENOUGH_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {ENOUGH_S:g} s"
        time.sleep(every_s)
