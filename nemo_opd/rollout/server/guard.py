"""Parent process of a server, which ends it and all its processes when the run ends: run as a script.

    python guard.py COMMAND …

The server's temporary files, sockets among them, are in a folder that is removed with it.

Standard input is a pipe that nobody writes to: it is closed when the run ends, however it ends.
Exits with the server's code. Imports nothing of this package, so that it starts in a moment.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.2
GRACE_S = 5.0
"""Time between the request to end and the kill."""


def main(command: list[str]) -> int:
    # Processes whose parent died become children of this one, so that none is lost.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run = os.getppid()
    # A signal ends the server, as the closed pipe does.
    for number in _SIGNALS:
        signal.signal(number, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="opd_server_", ignore_cleanup_errors=True) as folder:
        try:
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, "TMPDIR": folder})
            while server.poll() is None and os.getppid() == run and not _is_closed():
                pass
            return server.poll() or 0
        except OSError as error:
            print(f"cannot start {command[0]}: {error}", file=sys.stderr)
            return 127
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            _end_descendants()


def _is_closed() -> bool:
    """Return whether the run has closed the pipe; waits a moment for it."""
    readable, _, _ = select.select([0], [], [], _POLL_S)
    return bool(readable) and not os.read(0, 1)


def _end_descendants() -> None:
    """Ask all processes below this one to end, and kill those that are left after a while."""
    deadline = time.monotonic() + GRACE_S
    for process in _descendants():
        _send(process, signal.SIGTERM)
    while left := _descendants():
        if time.monotonic() > deadline:
            for process in left:
                _send(process, signal.SIGKILL)
        psutil.wait_procs(left, timeout=_POLL_S)


def _descendants() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
