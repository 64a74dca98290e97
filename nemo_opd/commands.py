"""Commands with a time limit, which leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_CLOSED_S = 5.0
"""Until a killed command's output ends, which it does not if a process hangs in a driver or has left the session."""


def run(
    command: Sequence[str], limit_s: float, *, paths: Sequence[str], folder: Path | None = None
) -> tuple[int | None, str]:
    """Run a command in a separate session; return its exit status, None past its limit, and what it printed.

    paths: PYTHONPATH of the command. What it has started is killed with it, and when it has ended. Raises OSError where
    there is no command of that name.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        _end(process.pid)
        return None, _rest(process)
    finally:
        _end(process.pid)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt inside for SIGTERM and SIGHUP too, so that commands that run are ended."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _rest(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=_CLOSED_S)[0]
    except subprocess.TimeoutExpired as error:
        # In bytes, also of a process whose output is text [CPython issue 87597].
        return error.output.decode(errors="replace") if isinstance(error.output, bytes) else error.output or ""


def _end(session: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
