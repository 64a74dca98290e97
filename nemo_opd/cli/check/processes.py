"""A command of the check, and how it ended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_opd import commands
from nemo_opd.paths import CHECKOUT

_LAST = 40
"""Lines that are reported of what failed."""


@dataclass(frozen=True)
class Done:
    status: int | None
    """Exit status; None where it ran past its limit."""
    output: str
    """Standard output and errors."""

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
    """Run a command in the checkout, if there is one. Raises OSError where there is none of its name."""
    paths = [*([] if CHECKOUT is None else [str(CHECKOUT)]), os.environ.get("PYTHONPATH", "")]
    return Done(*commands.run(command, limit_s, paths=paths, folder=CHECKOUT))
