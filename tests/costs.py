"""What a test may cost, by its marker: one without any is `unit`, and computes in this process alone."""

import multiprocessing.process
import os
import sys
import threading
from pathlib import PurePath
from typing import Any

MARKERS = {"world", "ray", "server", "tokenizers", "nightly", "gpu"}
PROCESSES = ("subprocess.Popen", "os.fork", "os.posix_spawn")
"""Events of Python's audit hooks."""
ALLOWED = {"fc-list", "template_process.py"}
"""Programs that start once: matplotlib's for its list of fonts, and the one that renders chat templates."""
unit_test: str | None = None
"""The unit test that runs now."""


def refuse(what: str, marker: str) -> None:
    """Fail a unit test that does something else: `pytest -m unit` is the loop that takes a minute or two."""
    if unit_test is not None:
        raise AssertionError(f"{unit_test} is a unit test and {what}; mark it {marker}")


def check_threads(test: str) -> None:
    """Fail a test that leaves a user's code under way: as it holds the interpreter's lock, all that follows is slow."""
    for thread in threading.enumerate():
        if thread.name == "user's code":
            thread.join(5)
            if thread.is_alive():
                raise AssertionError(f"{test} leaves a thread of a user's code")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    command = arguments[1] if event == "subprocess.Popen" else ()
    if event in PROCESSES and not ALLOWED & {PurePath(os.fsdecode(word)).name for word in command[:3]}:
        refuse(f"starts a process ({arguments})", "world")


def _start(process: Any) -> None:
    refuse(f"starts a process ({process.name})", "world")
    _start_unwatched(process)


_start_unwatched: Any = multiprocessing.process.BaseProcess.start
sys.addaudithook(_watch)
# Those of a fork server and spawned ones are no event.
multiprocessing.process.BaseProcess.start = _start  # type: ignore[method-assign]
