"""A server's process, in a world of its own."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_opd.config.secrets import without_secrets
from nemo_opd.errors import RolloutError
from nemo_opd.rollout.server import guard

WORLD = {"RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"} | {
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
}
"""What a launcher of processes says about us and not about the server.

torchrun sets one OpenMP thread a process, which is no advice for a server that is alone.
"""
WORLDS = ("TORCHELASTIC_", "TORCH_NCCL_", "RAY_", "SLURM_", "PMI_", "OMPI_")
"""Prefixes of more of them."""
CLOSE_S = guard.GRACE_S + 10.0
"""Time for all of a server's processes to be gone."""
TAIL_LINES = 20
CAUSE = re.compile(r"(?:^|\s)([\w.]+(?:Error|Exception): .+)")
WARNING = re.compile(r"\bWARN(ING)?\b")
CAUSE_LENGTH = 400
"""Characters of it that are told."""


def clean_environment(own: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what torchrun, Ray or a job scheduler set for it, and with `own` on top."""
    kept = {name: value for name, value in os.environ.items() if name not in WORLD and not name.startswith(WORLDS)}
    return kept | dict(own)


def cause(log: Sequence[str]) -> str:
    """Return the first error that a log tells, such as `ValueError: …`, or its last line where it tells none."""
    errors = (CAUSE.search(line) for line in log if not WARNING.search(line))
    first = next((match.group(1) for match in errors if match is not None), None)
    last = next((line.strip() for line in reversed(log) if line.strip()), "it said nothing")
    return without_secrets(first or last)[:CAUSE_LENGTH]


class ServerProcess:
    """A command in its own session, logging into a file; it ends with this process, however this one ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Raises RolloutError where the log cannot be written."""
        self.command, self.log = tuple(command), log
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as stream:
                self._guard = subprocess.Popen(
                    # -P: the guard's folder has modules with names that others have too.
                    [sys.executable, "-P", guard.__file__, *self.command],
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=clean_environment(environment),
                    start_new_session=True,
                )
        except OSError as error:
            raise RolloutError(f"cannot start {self.command[0]}, which logs into {log}: {error}") from error

    @property
    def is_alive(self) -> bool:
        return self._guard.poll() is None

    def check(self) -> None:
        """Raises RolloutError where the server has died."""
        if not self.is_alive:
            raise self.error(
                f"the rollout server died (exit code {self._guard.returncode}; started with {' '.join(self.command)})"
            )

    def error(self, message: str) -> RolloutError:
        """With the cause as the log tells it, and as a note the log's last lines.

        A server of several processes ends with what followed from the error, at length.
        """
        lines = self.log.read_text(errors="replace").splitlines()
        error = RolloutError(f"{message}: {cause(lines)}; its log is {self.log}")
        error.add_note("\n".join(lines[-TAIL_LINES:]))
        return error

    def close(self) -> None:
        """All of its processes are gone afterwards, in bounded time. Closing twice is closing once."""
        stdin = self._guard.stdin
        if stdin is not None and not stdin.closed:
            stdin.close()
        deadline = time.monotonic() + CLOSE_S
        try:
            self._guard.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._guard.pid, 9)
            self._guard.wait()
