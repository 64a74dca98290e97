"""Commands with a time limit that leave no process behind."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_CLOSED_S = 5.0
"""Wait for the end of a killed command's output, which may not come if a process hangs in a driver or left the session.
"""


def run(
    command: Sequence[str], limit_s: float, *, paths: Sequence[str], folder: Path | None = None
) -> tuple[int | None, str]:
    """Run a command in a separate session; return its exit status, None if it exceeded the limit, and its output.

    paths: PYTHONPATH of the command. Its child processes are killed when it ends or is killed. Raises OSError if the
    command does not exist.
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
        return None, _remaining_output(process)
    finally:
        _end(process.pid)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block for SIGTERM and SIGHUP too, so that running commands are ended."""
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _remaining_output(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=_CLOSED_S)[0]
    except subprocess.TimeoutExpired as error:
        # Bytes even in text mode [CPython issue 87597].
        return error.output.decode(errors="replace") if isinstance(error.output, bytes) else error.output or ""


def _end(session: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
