#!/usr/bin/env python
"""Tries this project on the GPUs of this machine, and writes what it found, for people and as data.

uv run tools/gpu_check.py                                  # everything; expected to take some minutes
uv run tools/gpu_check.py --only ipc tests                 # some of it
uv run tools/gpu_check.py --student llama_tiny --teacher qwen_tiny --length 64      # smaller models

Each part runs in separate processes with a time limit, and none stops another. The exit status is 1 where one failed.
On a machine without a GPU the parts that need one say so, and the step is that of tiny models. Parts that are not asked
for keep what an earlier check of the same commit, packages and machine has found in the folder.
"""

import sys

# A script's folder comes first on its path; what it imports is named from the root.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

if __name__ == "__main__":  # before imports that take many seconds
    print("loading PyTorch …", file=sys.stderr, flush=True)

import argparse
import tempfile
from pathlib import Path

import torch

from nemo_opd.commands import ending_on_signals
from tools.gpu.parts import PARTS, Job
from tools.gpu.report import FILE, ROOT, Outcome, Report

_RESULTS = ROOT / "benchmarks" / "results"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    on_gpu = torch.cuda.is_available()
    models, size = ("llama_1b", "qwen_4b") if on_gpu else ("llama_tiny", "qwen_tiny"), 2048 if on_gpu else 64
    parser.add_argument("--student", default=models[0], help="a preset of benchmarks/step.py, or a config.json")
    parser.add_argument("--teacher", default=models[1], help="likewise")
    parser.add_argument("--length", type=int, default=size, help="tokens of a text of the measured step")
    parser.add_argument("--rows", type=int, default=16 if on_gpu else 4, help="texts of a step")
    parser.add_argument("--micro", type=int, default=4, help="texts at a time")
    parser.add_argument("--mfu-floor", type=float, default=0.3, metavar="SHARE", help="least MFU of the step")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="of which those marked gpu run")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="for each part")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of gpu_check.md and gpu_check.json")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    report = Report.begin(["uv", "run", *sys.argv], options.output)
    with ending_on_signals(), tempfile.TemporaryDirectory() as scratch:
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
            try:
                report.parts[name] = PARTS[name](job)
            except KeyboardInterrupt:
                print(f"interrupted in {name}; what was found before is in {options.output / FILE}", file=sys.stderr)
                return 130
            # As soon as there is something: a later part may take the machine down.
            report.write(options.output)
    print(report.markdown())
    return int(any(part.outcome is Outcome.FAILED for part in report.parts.values()))


if __name__ == "__main__":
    sys.exit(main())
