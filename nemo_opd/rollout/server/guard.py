"""Parent process of a server, run as a script; it ends the server and all its processes when the run ends.

    python guard.py FOLDER COMMAND …

The server's temporary files, including sockets, are in FOLDER, which is removed with it, and so is its shared memory.

Standard input is a pipe that nobody writes to; it closes when the run ends, however it ends.
Exits with the server's code. Imports nothing from this package, so that it starts quickly.
"""

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.2
GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL."""
_SHARED_MEMORY = "/dev/shm"
_SEGMENT = re.compile(r"(psm_|sem\.mp-)\w+")
"""Name of a `multiprocessing` segment or semaphore."""


def main(folder: str, command: list[str]) -> int:
    # Orphaned processes become children of this one, so that none is lost.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run = os.getppid()
    # A signal ends the server, like the closed pipe.
    for number in _SIGNALS:
        signal.signal(number, lambda *_: sys.exit(0))
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
        shutil.rmtree(folder, ignore_errors=True)


def _is_closed() -> bool:
    """Return whether the run has closed the pipe, after waiting briefly for it."""
    readable, _, _ = select.select([0], [], [], _POLL_S)
    return bool(readable) and not os.read(0, 1)


def _end_descendants() -> None:
    """Terminate all processes below this one, and kill those that remain after `GRACE_S`."""
    deadline = time.monotonic() + GRACE_S
    shared_memory = set()
    for process in _descendants():
        shared_memory |= _shared_memory(process)
        _send(process, signal.SIGTERM)
    while remaining := _descendants():
        if time.monotonic() > deadline:
            for process in remaining:
                _send(process, signal.SIGKILL)
        psutil.wait_procs(remaining, timeout=_POLL_S)
    for file in os.scandir(_SHARED_MEMORY) if shared_memory else ():  # a killed process cannot remove it
        if file.inode() in shared_memory and _SEGMENT.fullmatch(file.name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)


def _shared_memory(process: psutil.Process) -> set[int]:
    """Return the inodes of the shared memory that the process maps: a semaphore is mapped under another name."""
    try:
        with open(f"/proc/{process.pid}/maps", encoding="utf-8", errors="replace") as maps:
            return {int(line.split()[4]) for line in maps if f"{_SHARED_MEMORY}/" in line}
    except OSError:
        return set()


def _descendants() -> list[psutil.Process]:
    running = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
