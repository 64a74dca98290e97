"""The process of a server."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_opd.config.secrets import without_secrets
from nemo_opd.errors import RolloutError
from nemo_opd.rollout.server import guard

_LAUNCHER_VARIABLES = {
    *("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
}
"""Variables that launchers set to describe this process.

torchrun sets one OpenMP thread per process, which does not suit a server.
"""
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "RAY_", "SLURM_", "PMI_", "OMPI_")
_CLOSE_S = guard.GRACE_S + 10.0
"""Time for all of a server's processes to end."""
_TAIL_LINES = 20
_CAUSE = re.compile(r"(?:^|\s)([\w.]+(?:Error|Exception): .+)")
_WARNING = re.compile(r"\bWARN(ING)?\b")
_CAUSE_LENGTH = 400
"""Characters of the cause in errors."""


def _server_environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without launcher variables, updated with `overrides`."""
    names = {name for name in os.environ.keys() - _LAUNCHER_VARIABLES if not name.startswith(_LAUNCHER_PREFIXES)}
    return {name: os.environ[name] for name in names} | dict(overrides)


def cause(log: Sequence[str]) -> str:
    """Return the first error in a log, such as `ValueError: …`, else its last line."""
    errors = (_CAUSE.search(line) for line in log if not _WARNING.search(line))
    first = next((match.group(1) for match in errors if match is not None), None)
    last = next((line.strip() for line in reversed(log) if line.strip()), "it logged nothing")
    return without_secrets(first or last)[:_CAUSE_LENGTH]


class ServerProcess:
    """A command in its own session that logs to a file and ends with this process, however this process ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start the command. Raises RolloutError if the log cannot be written."""
        self.command, self.log = tuple(command), log
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as stream:
                self._guard = subprocess.Popen(
                    # -P: modules in the guard's folder would shadow others.
                    [sys.executable, "-P", guard.__file__, *self.command],
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=_server_environment(environment),
                    start_new_session=True,
                )
        except OSError as error:
            raise RolloutError(f"cannot start {self.command[0]}, which logs to {log}: {error}") from error

    def check(self) -> None:
        """Raise RolloutError if the server has died."""
        if self._guard.poll() is not None:
            raise self.error(
                f"the rollout server died (exit code {self._guard.returncode}; started with {' '.join(self.command)})"
            )

    def error(self, message: str) -> RolloutError:
        """Return an error with its cause from the log, and the log's last lines as a note.

        With several processes, the log ends with consequences of the error, so the first error counts as the cause.
        """
        lines = self.log.read_text(errors="replace").splitlines()
        error = RolloutError(f"{message}: {cause(lines)}; its log is {self.log}")
        error.add_note("\n".join(lines[-_TAIL_LINES:]))
        return error

    def close(self) -> None:
        """End all of the server's processes in bounded time; may be called twice."""
        stdin = self._guard.stdin
        if stdin is not None and not stdin.closed:
            stdin.close()
        try:
            self._guard.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._guard.pid, 9)
            self._guard.wait()
