"""Tests this project on the machine's GPU: speed first, each part in its own processes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from nemo_opd.cli.check import processes
from nemo_opd.cli.check.parts import Part, plan, sanitized
from nemo_opd.cli.check.report import FILE, PASSED, SKIPPED, Report, Result, read_output
from nemo_opd.cli.command import Command
from nemo_opd.commands import ending_on_signals
from nemo_opd.paths import CHECKOUT

_RESULTS = Path() if CHECKOUT is None else CHECKOUT / "benchmarks" / "results" / "gpu"
_NAMES = [part.name for group in plan(Path(), Path(), has_gpu=True) for part in group]
_LEAST_S = 25.0
"""Remaining seconds below which no part is started."""
_LAST_LINES = 12
"""Lines of output shown for a failed part."""
_MODELS_BYTES = 40 << 30
EPILOG = f"""\
The parts are {", ".join(_NAMES)}. Each has its own time limit, and a failed part does not stop the next ones. Results
are written after each part, all output to one log. The exit status is 1 if a part failed. Without a GPU the parts are
small, and parts that need one are skipped. Parts that are not run keep the results of an earlier check of the same
commit, packages and machine in the folder.

examples:
  nemo-opd check                                everything that fits into eight minutes
  nemo-opd check --only step --within 120       one part again
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=_NAMES, default=_NAMES, metavar="PART", help="parts to run")
    parser.add_argument(
        "--within", type=float, default=480, metavar="SECONDS", help="time limit of the whole check (default 480)"
    )
    parser.add_argument(
        "--models", type=Path, metavar="FOLDER", help="keep the models of the steps, 17 GB, here for a later check"
    )
    parser.add_argument(
        "--output", type=Path, default=_RESULTS, metavar="FOLDER", help="folder of gpu_check.* (default %(default)s)"
    )


def check(options: Namespace, console: Console) -> int:
    end_s = time.monotonic() + options.within
    print("loading PyTorch …", file=sys.stderr, flush=True)
    import torch

    has_gpu = torch.cuda.is_available()
    report = Report.begin(shlex.join(sys.argv), options.output)
    with ending_on_signals(), _scratch(options.models) as (models, scratch), _clocks(options.output):
        waiting = plan(models, scratch, has_gpu=has_gpu)
        while waiting:
            parts = [part for part in waiting.pop(0) if part.name in (*options.only, sanitized().name)]
            try:
                for name, output in _run(parts, scratch, report, end_s):
                    if name == "kernels" and "CUDA error" in output and shutil.which("compute-sanitizer"):
                        waiting.insert(0, [sanitized()])
            except KeyboardInterrupt as interrupt:
                interrupt.add_note(f"results of finished parts are in {options.output / FILE}")
                raise
    print(report.markdown())
    return int(any(part.outcome.startswith("FAILED") for part in report.parts.values()))


def _run(parts: list[Part], scratch: Path, report: Report, end_s: float) -> Iterator[tuple[str, str]]:
    """Run parts at the same time, add their results, and yield each part's name and output as it ends.

    end_s: end of the check on the monotonic clock.
    """
    running: dict[str, tuple[Part, subprocess.Popen[bytes], float]] = {}
    try:
        for part in parts:
            begun = time.monotonic()
            if part.needs_checkout and CHECKOUT is None:
                report.add(part.name, Result(f"{SKIPPED}: needs a checkout with the tests and the benchmarks"))
            elif end_s - begun < _LEAST_S:
                report.add(part.name, Result(f"{SKIPPED}: no time left"))
            else:
                print(f"{part.name} …", file=sys.stderr, flush=True)
                log = scratch / f"{part.name}.log"
                process = processes.start(part.name, part.command, log, is_interpreted=part.is_interpreted)
                running[part.name] = part, process, begun
        while running:
            for name, (part, process, begun) in list(running.items()):
                now, status = time.monotonic(), process.poll()
                limit_s = min(part.limit_s, end_s - begun)
                if status is None and now - begun < limit_s:
                    continue
                processes.end(name)
                del running[name]
                late = f"FAILED: stopped at its limit of {limit_s:.0f} s"
                outcome = late if status is None else f"FAILED: exit status {status}" if status else PASSED
                output = (scratch / f"{name}.log").read_text(encoding="utf-8", errors="replace")
                report.add(name, read_output(outcome, now - begun, output), output)
                _print_result(name, report.parts[name], output)
                yield name, output
            time.sleep(0.1)
    finally:
        for name in running:
            processes.end(name)


def _print_result(name: str, result: Result, output: str) -> None:
    lines = [f"{name}: {result.outcome}, {result.seconds} s  {result.tests}"]
    if result.outcome.startswith("FAILED"):
        lines += [f"    {line}" for line in output.splitlines()[-_LAST_LINES:]]
    print("\n".join(lines), file=sys.stderr, flush=True)


@contextmanager
def _scratch(models: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of the models, in memory if they fit, and a folder for logs and results."""
    shared = Path("/dev/shm")
    is_roomy = shared.is_dir() and shutil.disk_usage(shared).free > _MODELS_BYTES
    with (
        tempfile.TemporaryDirectory(prefix="nemo_opd_check_") as scratch,
        tempfile.TemporaryDirectory(prefix="nemo_opd_models_", dir=shared if is_roomy else None) as temporary,
    ):
        yield models or Path(temporary), Path(scratch)


@contextmanager
def _clocks(folder: Path) -> Iterator[None]:
    """Log the GPU's clocks, power and memory to clocks.csv every second."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    fields = "timestamp,clocks.sm,power.draw,temperature.gpu,memory.used,utilization.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-l", "1"]
    with (folder / "clocks.csv").open("w") as sink, subprocess.Popen(command, stdout=sink) as process:
        try:
            yield
        finally:
            process.kill()


COMMAND = Command(__doc__, EPILOG, add_arguments, check)
