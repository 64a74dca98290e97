"""Waits for what other threads and processes do."""

import time
from collections.abc import Callable

ENOUGH_S = 300.0
"""Generous: the machine may be busy. What is healthy needs a tenth."""
CLEAN_S = 40.0
"""For processes to end: less than the minute after which Ray's own would end by themselves."""


def wait_until(condition: Callable[[], bool], what: str, *, every_s: float = 0.1) -> None:
    deadline = time.monotonic() + ENOUGH_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {ENOUGH_S:g} s"
        time.sleep(every_s)
