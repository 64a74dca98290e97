"""Stands between a run and a server, so that the server and all it started end with either: run as a script.

    python guard.py COMMAND …

The server's temporary files, sockets among them, are in a folder of its own, which goes with it.

Communicates through standard input, a pipe that nobody writes to: its end is the run's end, however the run ended.
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

PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 0.2
GRACE_S = 5.0
"""From being asked to end to being killed."""


def main(command: list[str]) -> int:
    # Processes whose own parent died become children of this one, so that none gets lost.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run = os.getppid()
    # Whoever ends this process ends the server: by closing the pipe, which comes with its end, or by a signal.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="opd_server_", ignore_cleanup_errors=True) as folder:
        try:
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, "TMPDIR": folder})
            while server.poll() is None and os.getppid() == run and not is_closed():
                pass
            return server.poll() or 0
        except OSError as error:
            print(f"cannot start {command[0]}: {error}", file=sys.stderr)
            return 127
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            end_descendants()


def is_closed() -> bool:
    """Whether the run's end of the pipe is gone; waits a moment for it."""
    readable, _, _ = select.select([0], [], [], LOOK_S)
    return bool(readable) and not os.read(0, 1)


def end_descendants() -> None:
    """Ask all that is below this process to end, and kill what is still there after a while."""
    deadline = time.monotonic() + GRACE_S
    for process in descendants():
        signalled(process, signal.SIGTERM)
    while left := descendants():
        if time.monotonic() > deadline:
            for process in left:
                signalled(process, signal.SIGKILL)
        psutil.wait_procs(left, timeout=LOOK_S)


def descendants() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if is_there(each)]


def is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def signalled(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
