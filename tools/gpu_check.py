#!/usr/bin/env python
"""Measures and tests this project on the machine's GPU: speed first, each part in its own processes.

uv run tools/gpu_check.py                             # everything that fits into eight minutes
uv run tools/gpu_check.py --only step --within 120    # one part

Each part has a time limit, and a failed part does not stop the next ones. gpu_check.md and gpu_check.json (results) and
gpu_check.log (all output) are written after each part, clocks.csv every second. The exit status is 1 if a part failed.
Without a GPU the parts are small, and parts that need one are skipped.
"""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from nemo_opd.paths import commit, package_version
from nemo_opd.training.interrupt import interruptible

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = {package.name.lower().replace("_", "-"): package.version for package in distributions() if package.name}
PACKAGES = ("torch", "transformers", "ray", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
CLOCKS = (
    "nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu,memory.used,utilization.gpu "
    "--format=csv,noheader -l 1"
)
TEST = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)(?= tests/|[^\n]*\[ *\d+%\])")
"""A test in pytest's output, even if that ends before its summary; with several workers its name follows."""
LEAST_S = 25.0
"""Remaining seconds below which no part is started."""
MODELS_BYTES = 40 << 30
MARK = "NEMO_OPD_GPU_CHECK"
"""Environment variable that all processes of a part inherit, even those that start a session, as Ray's do."""


@dataclass(frozen=True)
class Part:
    """A command in its own process. Its results are the JSON lines that it prints; its exit status reports failure."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    skip: str = ""
    """Reason not to run it."""


def plan(models: Path, scratch: Path, *, has_gpu: bool) -> list[list[Part]]:
    """Return groups of parts; the parts of a group run at the same time.

    models: folder of the models of the measured steps. scratch: folder for other files.
    """
    kernels = _python("benchmarks/losses_kernels.py check")
    if has_gpu:
        sizes = "--student llama_1b --same-teacher llama_3b --teacher qwen_4b --length 2048 --rows 16 --micro 4"
        sizes += " --rounds 4 --mfu-floor 0.3"
        gold_sizes = "--student llama_1b --teacher qwen_4b --length 512"  # TRL's time grows with the length's square
        positions, divisor = "--positions 2048 8192 --budgets 4 2 1 --device cuda", ""
        factor, unless_gpu = 1, ""
    else:
        sizes = "--student llama_tiny --same-teacher llama_tiny --teacher qwen_tiny --length 32"
        gold_sizes = "--student llama_tiny --teacher qwen_tiny --length 32 --gold-limit 400"
        positions, divisor = "--positions 16 --divisor 64", "--divisor 64"
        # Machines without a GPU have few cores, and the parts mostly import.
        factor, kernels, unless_gpu = 5, ("env", "TRITON_INTERPRET=1", *kernels), "needs a GPU"
    folders, local = ("--models", str(models), "--output", str(scratch)), ("--set", "cluster.launcher=local")
    step = _python(f"benchmarks/step.py {sizes} --loss p_kl --without-gold", *folders)
    gold = f"benchmarks/step.py {gold_sizes} --rows 8 --rounds 3 --warmup 1 --require-gold"
    losses = _python(f"benchmarks/losses_floor.py {positions}", "--output", str(scratch))
    files = gpu_test_files()
    runs = [file for file in files if file.startswith("tests/training/")]  # take as long as all other tests together
    pytest = "-m pytest -m gpu -vv --tb=short -p no:cacheprovider"  # -vv, as the project's settings have -q
    tests = _python(f"{pytest} -n 4 --dist loadfile", *(file for file in files if file not in runs))
    groups = [
        [Part("machine", 75, _python("tools/gpu_parts.py machine"))],
        [Part("models", 100, (*step, "--write-only")), Part("kernels", 100, kernels)],
        [Part("step", 110, (*step, *local))],
        [Part("tests", 150, tests), Part("demos", 240, _python("tools/gpu_parts.py demos", str(scratch / "demos")))],
        [Part("kernel-times", 60, _python("benchmarks/losses_kernels.py time"), skip=unless_gpu)],
        [Part("losses", 60, losses)],
        [Part("ray-step", 120, step)],
        [Part("plain-step", 75, _python("benchmarks/step_plain.py", str(models)))],
        [Part("gold", 90, _python(gold, *folders, *local), skip=_missing("trl"))],
        [Part("liger", 60, _python(f"benchmarks/losses_liger.py {divisor}"), skip=_missing("liger-kernel"))],
        [Part("runs", 240, _python(f"{pytest} -n 5 --dist worksteal", *runs))],
    ]
    return [[replace(part, limit_s=factor * part.limit_s) for part in group] for group in groups]


def _python(line: str, *more: str) -> tuple[str, ...]:
    return (sys.executable, *line.split(), *more)


def _missing(package: str) -> str:
    return "" if package in INSTALLED else f"{package} is not installed"


def gpu_test_files() -> list[str]:
    """Return the files that contain tests marked `gpu`: other files may need libraries that this machine lacks."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "pytest.mark.gpu" in file.read_text(encoding="utf-8")]


@dataclass(frozen=True)
class Result:
    outcome: str
    """`passed`, `skipped: WHY` or `FAILED: WHY`."""
    seconds: float = 0.0
    tests: str = ""
    """Numbers of tests by outcome, also of a part that was stopped."""
    values: list[Any] = field(default_factory=list)
    """Parsed JSON lines of the output."""


def read_output(outcome: str, seconds: float, output: str) -> Result:
    """Parse a part's output; the part counts as skipped if all its tests were."""
    tests = Counter(TEST.findall(output))
    values = []
    for line in output.splitlines():
        if line.startswith("{"):
            with suppress(ValueError):  # the process was killed within the line
                values.append(json.loads(line))
    if outcome == "passed" and set(tests) == {"SKIPPED"}:
        outcome = "skipped: all tests; the log has the reasons"
    return Result(outcome, round(seconds, 1), ", ".join(f"{n} {kind.lower()}" for kind, n in tests.items()), values)


@dataclass
class Report:
    """Results of the parts so far, and their files in `folder`."""

    folder: Path
    facts: dict[str, str]
    parts: dict[str, Result] = field(default_factory=dict)

    def add(self, name: str, result: Result, output: str = "") -> None:
        """Add and print a part's result, and write the files at once: the next part may crash the machine."""
        self.parts[name] = result
        line = f"{name}: {result.outcome}, {result.seconds} s  {result.tests}"
        last_lines = output.splitlines()[-12:] if result.outcome.startswith("FAILED") else []
        print(line, *last_lines, sep="\n    ", file=sys.stderr, flush=True)
        with (self.folder / "gpu_check.log").open("a", encoding="utf-8") as log:
            log.write(f"\n======== {line}\n{output}")
        (self.folder / "gpu_check.md").write_text(self.markdown(), encoding="utf-8")
        data = {"facts": self.facts, "parts": {name: asdict(part) for name, part in self.parts.items()}}
        text = json.dumps(data, indent=1, ensure_ascii=False)
        (self.folder / "gpu_check.json").write_text(f"{text}\n", encoding="utf-8")

    def markdown(self) -> str:
        lines = ["# GPU check", "", *(f"* {label}: {value}" for label, value in self.facts.items()), ""]
        lines += ["| part | outcome | seconds | tests |", "|---|---|---|---|"]
        lines += [f"| {name} | {part.outcome} | {part.seconds} | {part.tests} |" for name, part in self.parts.items()]
        for name, part in self.parts.items():
            if part.values:
                values = [json.dumps(value, ensure_ascii=False) for value in part.values]
                lines += ["", f"## {name}", "", "```json", *values, "```"]
        return "\n".join(lines) + "\n"


def run(parts: Sequence[Part], scratch: Path, report: Report, end_s: float) -> None:
    """Run parts at the same time and add each result as its part ends. end_s: end of the check (time.monotonic)."""
    waiting = list(parts)
    running: dict[Part, tuple[subprocess.Popen[bytes], float]] = {}
    try:
        while waiting or running:
            while waiting:
                part, begin = waiting.pop(0), time.monotonic()
                if reason := part.skip or ("no time left" if end_s - begin < LEAST_S else ""):
                    report.add(part.name, Result(f"skipped: {reason}"))
                else:
                    print(f"{part.name} …", file=sys.stderr, flush=True)
                    running[part] = start(part.name, part.command, scratch / f"{part.name}.log"), begin
            for part, (process, begin) in list(running.items()):
                status, seconds, limit_s = process.poll(), time.monotonic() - begin, min(part.limit_s, end_s - begin)
                if status is None and seconds < limit_s:
                    continue
                end_processes(part.name)
                del running[part]
                late = f"FAILED: stopped at its limit of {limit_s:.0f} s"
                outcome = late if status is None else f"FAILED: exit status {status}" if status else "passed"
                output = (scratch / f"{part.name}.log").read_text(encoding="utf-8", errors="replace")
                report.add(part.name, read_output(outcome, seconds, output), output)
                if part.name == "kernels" and "CUDA error" in output and shutil.which("compute-sanitizer"):
                    # Names the kernel and the address.
                    memcheck = ("compute-sanitizer", "--tool", "memcheck", *part.command, "--small")
                    waiting.append(Part("sanitizer", 80, memcheck))
            time.sleep(0.1)
    finally:
        for part in running:
            end_processes(part.name)


def start(name: str, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a part in the checkout. It writes to a file: a pipe might never close if a process hangs in the driver."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_COMPILE_THREADS": "4",  # otherwise each compiling process starts a thread per core
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "PYTHONUNBUFFERED": "1",
        MARK: _mark(name),
    }
    stdin, stderr = subprocess.DEVNULL, subprocess.STDOUT
    with log.open("wb") as stdout:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )


def end_processes(name: str) -> None:
    """Kill a part's processes in all sessions, and wait until they end: the next part needs their GPU memory."""
    mark, limit = _mark(name), time.monotonic() + 15
    while time.monotonic() < limit:
        environments = {process: process.info["environ"] or {} for process in psutil.process_iter(["environ"])}
        processes = [process for process, environment in environments.items() if environment.get(MARK) == mark]
        if not processes:
            break
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.2)


def _mark(name: str) -> str:
    """Return the value of `MARK`, unique among checks on this machine."""
    return f"{os.getpid()} {name}"


def check(folder: Path, only: Sequence[str], models: Path | None, end_s: float) -> int:
    """Run parts, write their results into a folder and return the exit status."""
    import torch  # after the command line is checked, as it takes seconds

    versions = {"nemo-opd": package_version()} | {name: INSTALLED[name] for name in PACKAGES if name in INSTALLED}
    facts = {
        "commit": commit(),
        "date": datetime.now().date().isoformat(),
        "command": shlex.join(["tools/gpu_check.py", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {number}" for name, number in versions.items()),
    }
    report = Report(folder, facts)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_check.log").unlink(missing_ok=True)
    memory = Path("/dev/shm")
    is_roomy = memory.is_dir() and shutil.disk_usage(memory).free > MODELS_BYTES
    with (
        TemporaryDirectory(prefix="nemo_opd_check_") as scratch,
        TemporaryDirectory(prefix="nemo_opd_models_", dir=memory if is_roomy else None) as temporary,
    ):
        try:
            if shutil.which("nvidia-smi"):
                start("clocks", CLOCKS.split(), folder / "clocks.csv")
            for group in plan((models or Path(temporary)).resolve(), Path(scratch), has_gpu=torch.cuda.is_available()):
                run([part for part in group if part.name in only], Path(scratch), report, end_s)
        finally:
            end_processes("clocks")
    print(report.markdown())
    return int(any(part.outcome.startswith("FAILED") for part in report.parts.values()))


def main() -> int:
    begin = time.monotonic()
    names = [part.name for group in plan(Path(), Path(), has_gpu=True) for part in group]
    results = ROOT / "benchmarks" / "results" / "gpu" / f"{datetime.now():%Y-%m-%d_%H%M}"
    epilog = f"The parts are {', '.join(names)}."
    parser = ArgumentParser(description=__doc__, epilog=epilog, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=names, default=names, metavar="PART", help="parts to run")
    add("--within", type=float, default=480, metavar="SECONDS", help="limit of the whole check (default %(default)s)")
    add("--models", type=Path, metavar="FOLDER", help="keep the models of the steps, 17 GB, here for a later check")
    add("--output", type=Path, default=results, metavar="FOLDER", help="folder of the results (default %(default)s)")
    options = parser.parse_args()
    try:
        with interruptible():
            return check(options.output, options.only, options.models, begin + options.within)
    except KeyboardInterrupt:
        print(f"error: interrupted; results of finished parts are in {options.output}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
