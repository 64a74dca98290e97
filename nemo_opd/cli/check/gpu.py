"""Tries this project on the GPUs of this machine, and writes what it found, for people and as data."""

import shlex
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from nemo_opd.cli.check.report import Outcome, Report
from nemo_opd.cli.command import Command
from nemo_opd.paths import CHECKOUT

RESULTS = Path() if CHECKOUT is None else CHECKOUT / "benchmarks" / "results"
PARTS = ("machine", "ipc", "tests", "counts", "step")
EPILOG = """\
Each part runs in processes of its own with a time limit, and none stops another. The exit status is 1 where one failed.
On a machine without a GPU the parts that need one say so, and so do `tests`, `counts` and `step` where there is no
checkout of the project, which has the tests and the benchmark.

examples:
  nemo-opd check                          everything; some minutes
  nemo-opd check --only ipc tests         some of it
  nemo-opd check --student llama_tiny --teacher qwen_tiny --length 64      smaller models
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--student", default="llama_1b", help="a preset of benchmarks/step.py, or a config.json")
    parser.add_argument("--teacher", default="qwen_4b", help="likewise")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text of the measured step")
    parser.add_argument("--rows", type=int, default=16, help="texts of a step")
    parser.add_argument("--micro", type=int, default=4, help="texts at a time")
    parser.add_argument("--mfu-floor", type=float, default=0.3, metavar="SHARE", help="least MFU of the step")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="of which those marked gpu run")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="for each part")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder of gpu_check.md and gpu_check.json (default %(default)s)"
    )


def check(options: Namespace, console: Console) -> int:
    print("loading PyTorch …", file=sys.stderr, flush=True)
    from nemo_opd.cli.check.parts import CHECKS, Job

    report = Report.begin(shlex.join(sys.argv))
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(
            student=options.student,
            teacher=options.teacher,
            length=options.length,
            rows=options.rows,
            micro=options.micro,
            mfu_floor=options.mfu_floor,
            tests=tuple(options.tests),
            limit_s=options.limit,
            scratch=Path(scratch),
        )
        for name in options.only:
            print(f"{name} …", file=sys.stderr, flush=True)
            report.parts[name] = CHECKS[name](job)
            # As soon as there is something: a later part may take the machine down.
            report.write(options.output)
    print(report.markdown())
    return int(any(part.outcome is Outcome.FAILED for part in report.parts.values()))


COMMAND = Command(__doc__, EPILOG, add_arguments, check)
