"""Costs that a test's marker allows: a test without a marker is `unit` and starts no process."""

import multiprocessing.process
import os
import sys
import threading
from pathlib import PurePath
from typing import Any

MARKERS = {"world", "ray", "server", "tokenizers", "nightly", "gpu"}
PROCESSES = ("subprocess.Popen", "os.fork", "os.posix_spawn")
"""Events of Python's audit hooks that start a process."""
ALLOWED = {"fc-list", "template_process.py"}
"""Programs that may start in unit tests, once: matplotlib lists fonts, and a process renders chat templates."""
unit_test: str | None = None
"""Id of the running unit test, or None."""


def refuse(what: str, marker: str) -> None:
    """Fail a unit test that needs a marker: `pytest -m unit` must stay a loop of one or two minutes."""
    if unit_test is not None:
        raise AssertionError(f"{unit_test} is a unit test and {what}; mark it {marker}")


def check_threads(test: str) -> None:
    """Fail a test that leaves a user's code running: it holds the GIL, which slows down all later tests."""
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
# Processes of a fork server and spawned processes raise no audit event.
multiprocessing.process.BaseProcess.start = _start  # type: ignore[method-assign]
