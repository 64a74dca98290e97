"""Processes of the check's parts, which end together with all their children."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from nemo_opd.paths import CHECKOUT

_MARK = "NEMO_OPD_CHECK_PART"
"""Environment variable that all processes of a part inherit, even those that start a session, as Ray's do."""
_ENDED_S = 15.0


def start(name: str, command: tuple[str, ...], log: Path, *, is_interpreted: bool = False) -> subprocess.Popen[bytes]:
    """Start a part in the checkout, if there is one, with its output in `log`.

    A pipe might never close if a process hangs in the driver. Raises OSError if the command does not exist.
    """
    paths = [*([] if CHECKOUT is None else [str(CHECKOUT)]), os.environ.get("PYTHONPATH", "")]
    # Otherwise each compiling process starts a thread per core.
    compilers = {"TORCHINDUCTOR_COMPILE_THREADS": "4", **({"TRITON_INTERPRET": "1"} if is_interpreted else {})}
    with log.open("wb") as sink:
        return subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env={
                **os.environ,
                **compilers,
                "PYTHONPATH": os.pathsep.join(paths),
                "PYTHONUNBUFFERED": "1",
                _MARK: _mark_of(name),
            },
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(name: str) -> None:
    """Kill a part's remaining processes and wait a few seconds for them to end, as the next part needs their GPU
    memory.
    """
    limit = time.monotonic() + _ENDED_S
    while (pids := _marked(name)) and time.monotonic() < limit:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def _mark_of(name: str) -> str:
    """Return the value of the mark, unique among checks on this machine."""
    return f"{os.getpid()} {name}"


def _marked(name: str) -> list[int]:
    """Return the process ids of a part, in all sessions. Ended processes have no environment."""
    pids = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdecimal():
                variables = (process / "environ").read_bytes().split(b"\0")
                if f"{_MARK}={_mark_of(name)}".encode() in variables:
                    pids.append(int(process.name))
    return pids
