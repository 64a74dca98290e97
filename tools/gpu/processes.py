"""A command with a time limit, which leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tools.gpu.report import ROOT

_LAST = 40
"""Lines that are reported of what failed."""


@dataclass(frozen=True)
class Done:
    status: int | None
    """Exit status; None where it ran past its limit."""
    output: str
    """What it printed, and its errors."""

    def reason(self, limit_s: float) -> str:
        """Return why it failed, in a line."""
        if self.status is None:
            return f"ended after {limit_s:.0f} s, its limit"
        lines = [line for line in self.output.splitlines() if line.strip()]
        return f"exit status {self.status}: {lines[-1].strip() if lines else 'no output'}"

    @property
    def end(self) -> str:
        """The last lines of the output."""
        return "\n".join(self.output.splitlines()[-_LAST:])


def run(command: Sequence[str], limit_s: float) -> Done:
    """Run a command in the project's root. Raises OSError where there is none of its name."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return Done(process.returncode, output)
    except subprocess.TimeoutExpired:
        _end(process.pid)
        output, _ = process.communicate()
        return Done(None, output)
    finally:
        _end(process.pid)


def _end(session: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
