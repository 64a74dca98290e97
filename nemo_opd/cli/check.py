"""The verb that runs tools/gpu_check.py, which tests the project on a machine's GPUs and needs a checkout."""

import runpy
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from nemo_opd.paths import CHECKOUT


class _Check:
    def add_arguments(self, parser: ArgumentParser) -> None:
        """Define none; the script has its own."""

    def run(self, program: str, arguments: Sequence[str]) -> int:
        """Run the script in this process. Raises SystemExit with its status, or without a checkout."""
        if CHECKOUT is None:
            raise SystemExit(f"error: {program}: its tests are not installed; run it in a checkout of the project")
        sys.argv = [program, *arguments]
        runpy.run_path(str(CHECKOUT / "tools" / "gpu_check.py"), run_name="__main__")
        return 0


COMMAND = _Check()
