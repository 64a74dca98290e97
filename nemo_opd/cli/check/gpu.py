"""Tries this project on the GPUs of this machine, and writes what it found, for people and as data."""

import shlex
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_opd.cli.check.report import FILE, Outcome, Report
from nemo_opd.cli.command import Command
from nemo_opd.commands import ending_on_signals
from nemo_opd.paths import CHECKOUT

_RESULTS = Path() if CHECKOUT is None else CHECKOUT / "benchmarks" / "results"
_PARTS = ("machine", "ipc", "tests", "counts", "losses", "step")
_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "student": ("llama_tiny", "llama_1b"),
    "teacher": ("qwen_tiny", "qwen_4b"),
    "length": (64, 2048),
    "rows": (4, 16),
}
"""Defaults of the measured step, without a GPU and with one."""
EPILOG = """\
Each part runs in separate processes with a time limit, and none stops another. The exit status is 1 where one failed.
On a machine without a GPU the parts that need one say so, and the others are those of tiny models; `tests`, `counts`,
`losses` and `step` need a checkout of the project, which has the tests and the benchmarks. Parts that are not asked for
keep what an earlier check of the same commit, packages and machine has found in the folder.

examples:
  nemo-opd check                          everything; expected to take some minutes
  nemo-opd check --only ipc tests         some of it
  nemo-opd check --student llama_tiny --teacher qwen_tiny --length 64      smaller models
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--only", nargs="+", choices=_PARTS, default=list(_PARTS), metavar="PART", help=", ".join(_PARTS)
    )
    sizes: dict[str, tuple[type, str]] = {
        "student": (str, "a preset of benchmarks/step.py, or a config.json"),
        "teacher": (str, "likewise"),
    }
    sizes |= {"length": (int, "tokens of a text of the measured step"), "rows": (int, "texts of a step")}
    for name, (kind, meaning) in sizes.items():
        on_cpu, on_gpu = _DEFAULTS[name]
        parser.add_argument(f"--{name}", type=kind, help=f"{meaning} (default {on_gpu}, without a GPU {on_cpu})")
    parser.add_argument("--micro", type=int, default=4, help="texts at a time")
    parser.add_argument("--mfu-floor", type=float, default=0.3, metavar="SHARE", help="least MFU of the step")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="of which those marked gpu run")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="for each part")
    parser.add_argument(
        "--output", type=Path, default=_RESULTS, help="folder of gpu_check.md and gpu_check.json (default %(default)s)"
    )


def check(options: Namespace, console: Console) -> int:
    print("loading PyTorch …", file=sys.stderr, flush=True)
    import torch

    from nemo_opd.cli.check.parts import CHECKS, Job

    given = {name: getattr(options, name) or default[torch.cuda.is_available()] for name, default in _DEFAULTS.items()}
    report = Report.begin(shlex.join(sys.argv), options.output)
    with ending_on_signals(), tempfile.TemporaryDirectory() as scratch:
        job = Job(
            **given,
            micro=options.micro,
            mfu_floor=options.mfu_floor,
            tests=tuple(options.tests),
            limit_s=options.limit,
            scratch=Path(scratch),
        )
        for name in options.only:
            print(f"{name} …", file=sys.stderr, flush=True)
            try:
                report.parts[name] = CHECKS[name](job)
            except KeyboardInterrupt as interrupt:
                interrupt.add_note(f"the parts before {name} are in {options.output / FILE}")
                raise
            # As soon as there is something: a later part may take the machine down.
            report.write(options.output)
    print(report.markdown())
    return int(any(part.outcome is Outcome.FAILED for part in report.parts.values()))


COMMAND = Command(__doc__, EPILOG, add_arguments, check)
