"""Sandboxed processes, with limited output and without leftover child processes."""

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nemo_opd.config.reward import Isolation, SandboxSettings
from nemo_opd.sandbox.inside.isolation import DEVICES
from nemo_opd.types import Closing

PROGRAM = "bwrap"
INSIDE = Path(__file__).with_name("inside")
"""Scripts that run in a sandbox, with only the standard library."""
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_WALL = 4
"""Seconds of wall time per second of processor time."""
_GRACE_S = 30.0
"""Additional time for the sandbox to start and report."""
_ENDING_S = 5.0
_MESSAGE_BYTES = 1 << 16
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
_LIBRARIES = ("/usr", "/etc/ld.so.cache", "/etc/alternatives")


class SandboxError(Exception):
    """A failure to create a sandbox; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Output of a process, and how it ended."""

    output: bytes
    reason: str
    """`itself`, or the limit that ended it."""
    status: int | None = None
    """Exit status if it ended by itself."""


class SandboxedProcess(Closing):
    """A process in its own sandbox. The end of its `with` ends it and all its children."""

    def __init__(
        self,
        isolation: Isolation,
        settings: SandboxSettings,
        script: str,
        *,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start `script`, a file in `INSIDE`, with the descriptors `inherited` as its arguments."""
        self._settings = settings
        self._scratch = tempfile.mkdtemp(prefix="nemo_opd_program_") if isolation == "none" else None
        report, report_to = os.pipe()
        try:
            self._process = subprocess.Popen(
                self._command(isolation, script, report_to, inherited),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=(report_to, *inherited),
                start_new_session=True,
            )
        except OSError as error:
            os.close(report)
            self._remove_scratch()
            raise SandboxError(f"{error.strerror}: {error.filename}") from error
        finally:
            os.close(report_to)
        self._report = open(report, "rb", buffering=0)  # noqa: SIM115  closed by `close`

    def _command(self, isolation: Isolation, script: str, report_to: int, inherited: Sequence[int]) -> list[str]:
        settings = self._settings
        paths, symlinks, scratch_bytes = _readable_paths(), _root_links(), settings.scratch_mb << 20
        order = {
            "isolation": isolation,
            "parent": os.getpid(),
            "cpu_s": settings.timeout_s,
            "wall_s": _WALL * settings.timeout_s,
            "memory_bytes": settings.memory_mb << 20,
            "processes": settings.processes,
            "readable": paths,
            "links": symlinks,
            "scratch": self._scratch or "/tmp",
            "scratch_bytes": scratch_bytes,
            "report_to": report_to,
            "inherited": list(inherited),
        }
        prefix = _bubblewrap_command(paths, symlinks, scratch_bytes) if isolation == "bubblewrap" else []
        # -P and -s: no imports from the working folder or the user's packages. -S: the supervisor needs no packages.
        supervisor = [sys.executable, "-P", "-s", "-S", str(INSIDE / "supervise.py"), json.dumps(order)]
        return [*prefix, *supervisor, sys.executable, "-P", "-s", "-B", str(INSIDE / script), *map(str, inherited)]

    def wait(self) -> Ending:
        """Return its output and how it ended. Raises SandboxError if the sandbox could not be created."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        limits = {
            self._process.stdout: self._settings.output_kb << 10,
            self._report: _MESSAGE_BYTES,
            self._process.stderr: _MESSAGE_BYTES,
        }
        contents = {file: bytearray() for file in limits}
        is_complete = _read_to_the_end(contents, limits, _WALL * self._settings.timeout_s + _GRACE_S)
        output, report, problem = map(bytes, contents.values())
        if not is_complete:
            reason = "output" if len(output) >= limits[self._process.stdout] else "time"
            return Ending(output, reason)
        started, _, state = report.partition(b"\n")
        if started != b"started":
            raise SandboxError(_last_line(problem) or f"it ended with status {self._process.wait()}")
        return _ending(output, state)

    def terminate(self) -> None:
        """Ask the process to end, also from another thread than the one in `wait`."""
        self._process.terminate()

    def close(self) -> None:
        """End all its processes and free their resources."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        # Even if it has ended: if bubblewrap is terminated early, its child waits for it forever.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._report, self._process.stdout, self._process.stderr):
            assert file is not None
            file.close()
        self._remove_scratch()

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _read_to_the_end(contents: Mapping[Any, bytearray], limits: Mapping[Any, int], seconds: float) -> bool:
    """Read files to their ends into `contents`. Returns False if one exceeds its limit or time runs out."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for file in contents:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0, deadline - time.monotonic()))
            if not ready:
                return False
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                contents[key.fileobj] += chunk
                if len(contents[key.fileobj]) > limits[key.fileobj]:
                    return False
    return True


def _ending(output: bytes, state: bytes) -> Ending:
    """Return how the program ended. Raises SandboxError if a limit could not be set."""
    if not state:  # the supervisor was killed, for example by the kernel for lack of memory
        return Ending(output, "killed")
    report, _ = json.JSONDecoder().raw_decode(state.decode())
    if report["ended"] == "broken":
        raise SandboxError(report["why"])
    return Ending(output, report["ended"], report.get("status"))


def _last_line(problem: bytes) -> str:
    lines = problem.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _bubblewrap_command(readable: Sequence[str], links: Sequence[tuple[str, str]], scratch_bytes: int) -> list[str]:
    """Return the prefix of the command: new namespaces of all kinds, a read-only file system, and a separate /tmp."""
    return [
        PROGRAM,
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--die-with-parent", "--as-pid-1", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"),
        *(word for path in readable for word in ("--ro-bind", path, path)),
        *(word for path, target in links for word in ("--symlink", target, path)),
        *(word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        # Read-only, since root on the machine could write to /proc/sys.
        *("--proc", "/proc", "--remount-ro", "/proc"),
        *("--size", str(scratch_bytes), "--tmpfs", "/tmp", "--remount-ro", "/", "--"),
    ]


def _readable_paths() -> list[str]:
    """Return the folders and files that programs can read."""
    executable = os.path.realpath(sys.executable)
    python = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(executable)), str(INSIDE)]
    folders = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    paths = {*filter(os.path.exists, (*python, *_LIBRARIES)), *folders}
    return sorted(path for path in paths if not any(path.startswith(f"{parent}/") for parent in paths))


def _root_links() -> list[tuple[str, str]]:
    """Return the symbolic links at the root of the file system that programs need, each with its target."""
    return [(path, os.readlink(path)) for path in _SYSTEM if os.path.islink(path)]
