"""Tests this project on the machine's GPU: speed first, each part in its own processes."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.paths import CHECKOUT, UNKNOWN, commit, package_version
from nemo_opd.training.interrupt import interruptible

_FILE, _DATA, _LOG = "gpu_check.md", "gpu_check.json", "gpu_check.log"
_PASSED, _SKIPPED = "passed", "skipped"
_SAME = ("commit", "machine", "packages")
"""Facts that all parts of a report share."""
_PACKAGES = ("torch", "transformers", "ray", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_TEST = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)(?= tests/|[^\n]*\[ *\d+%\])")
"""A test in pytest's output, even if that ends before its summary; with several workers its name follows."""
_LEAST_S = 25.0
"""Remaining seconds below which no part is started."""
_LAST_LINES = 12
"""Lines of output shown for a failed part."""
_MODELS_BYTES = 40 << 30
_MARK = "NEMO_OPD_CHECK_PART"
"""Environment variable that all processes of a part inherit, even those that start a session, as Ray's do."""
_ENDED_S = 15.0
_RESULTS = Path() if CHECKOUT is None else CHECKOUT / "benchmarks" / "results" / "gpu" / date.today().isoformat()


_LARGE = "--student llama_1b --same-teacher llama_3b --teacher qwen_4b --length 2048"
_LARGE_BATCH = "--rows 16 --micro 4 --rounds 4 --mfu-floor 0.3"
_TINY = "--student llama_tiny --same-teacher llama_tiny --teacher qwen_tiny --length 32"
_GOLD = "--student llama_1b --teacher qwen_4b --length 512"
"""Texts of 512 tokens, as the time of TRL's trainer grows with the square of their length."""
_TINY_GOLD = "--student llama_tiny --teacher qwen_tiny --length 32 --gold-limit 400"
_GOLD_BATCH = "--rows 8 --rounds 3 --warmup 1 --require-gold"
_SLOWER = 5
"""Factor of the limits without a GPU: such a machine has few cores too, and all parts mostly import."""
_PARTS = (sys.executable, "-m", "nemo_opd.cli.check_parts")
_RUNS = "tests/training"
"""Tests of whole runs, which take as long as all other tests together."""


@dataclass(frozen=True)
class Part:
    """A command in its own process. Its results are the JSON lines that it prints; its exit status reports failure."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    is_interpreted: bool = False
    """Triton's kernels run in its interpreter."""
    package: str = ""
    """Package that it compares this project with; the part is skipped if it is not installed."""

    @property
    def needs_checkout(self) -> bool:
        """Whether it is a script or a test, which the package does not contain."""
        return self.command[1:2] != ("-m",) or "pytest" in self.command


def plan(models: Path, scratch: Path, *, has_gpu: bool) -> list[list[Part]]:
    """Return groups of parts; the parts of a group run at the same time. Without a GPU they are small.

    models: folder of the models of the measured steps. scratch: folder for other files.
    """
    folders = ("--models", str(models), "--output", str(scratch))
    local = ("--set", "cluster.launcher=local")
    sizes = f"{_LARGE} {_LARGE_BATCH}" if has_gpu else _TINY
    step = (*_script("step.py", f"{sizes} --loss p_kl --without-gold"), *folders)
    gold = (*_script("step.py", f"{_GOLD if has_gpu else _TINY_GOLD} {_GOLD_BATCH}"), *folders, *local)
    positions = "--positions 2048 8192 --budgets 4 2 1 --device cuda" if has_gpu else "--positions 16 --divisor 64"
    losses = (*_script("losses_floor.py", positions), "--output", str(scratch))
    parts = [
        [Part("machine", 75, (*_PARTS, "machine"))],
        [
            Part("models", 100, (*step, "--write-only")),
            Part("kernels", 100, _script("losses_kernels.py", "check"), is_interpreted=not has_gpu),
        ],
        [Part("step", 110, (*step, *local))],
        [
            Part("tests", 150, _pytest(4, "loadfile", without=_RUNS)),
            Part("demos", 240, (*_PARTS, "demos", str(scratch / "demos"))),
        ],
        [Part("kernel-times", 60, _script("losses_kernels.py", "time"))] if has_gpu else [],
        [Part("losses", 60, losses)],
        [Part("ray-step", 120, step)],
        [Part("plain-step", 75, (*_script("step_plain.py"), str(models)))],
        [Part("gold", 90, gold, package="trl")],
        [Part("liger", 60, _script("losses_liger.py", "" if has_gpu else "--divisor 64"), package="liger-kernel")],
        [Part("runs", 240, _pytest(5, "worksteal", only=_RUNS))],
    ]
    factor = 1 if has_gpu else _SLOWER
    return [[replace(part, limit_s=factor * part.limit_s) for part in group] for group in parts if group]


def sanitized() -> Part:
    """Return the kernels under compute-sanitizer, which names the failing kernel and address."""
    kernels = _script("losses_kernels.py", "check --small")
    return Part("sanitizer", 80, ("compute-sanitizer", "--tool", "memcheck", *kernels))


def _script(name: str, arguments: str = "") -> tuple[str, ...]:
    return (sys.executable, f"benchmarks/{name}", *arguments.split())


def _pytest(workers: int, dist: str, *, only: str = "tests", without: str | None = None) -> tuple[str, ...]:
    """Return the command for the tests marked `gpu`. The project's settings have -q, so -vv prints a line per test."""
    files = () if CHECKOUT is None else gpu_test_files(CHECKOUT)
    chosen = [file for file in files if file.startswith(only) and (without is None or not file.startswith(without))]
    options = f"-m gpu -vv -n {workers} --dist {dist} --tb=short -p no:cacheprovider"
    return (sys.executable, "-m", "pytest", *options.split(), *chosen)


def gpu_test_files(root: Path) -> list[str]:
    """Return the test files that contain tests marked `gpu`: other files may need libraries that this machine lacks."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(file.relative_to(root)) for file in files if "pytest.mark.gpu" in file.read_text(encoding="utf-8")]


@dataclass(frozen=True)
class Result:
    """Results of one part."""

    outcome: str
    """`passed`, `skipped: WHY` or `FAILED: WHY`."""
    seconds: float = 0.0
    tests: str = ""
    """Numbers of tests by outcome, also of a part that was stopped."""
    values: list[Any] = field(default_factory=list)
    """Parsed JSON lines of its output."""


def read_output(outcome: str, seconds: float, output: str) -> Result:
    """Parse a part's output; the part counts as skipped if all its tests were."""
    tests = Counter(_TEST.findall(output))
    values = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                values.append(json.loads(line))
            except ValueError:  # the process was killed within the line
                continue
    if outcome == _PASSED and set(tests) == {"SKIPPED"}:
        outcome = f"{_SKIPPED}: all tests; the log has the reasons"
    return Result(outcome, round(seconds, 1), ", ".join(f"{n} {kind.lower()}" for kind, n in tests.items()), values)


@dataclass
class Report:
    folder: Path
    facts: dict[str, str]
    parts: dict[str, Result] = field(default_factory=dict)

    @staticmethod
    def begin(command: str, folder: Path) -> Report:
        """Begin a report with the parts of an earlier check of the same commit, machine and packages in the folder."""
        installed = {"nemo-opd": package_version()} | {name: _version(name) for name in _PACKAGES}
        facts = {
            "commit": commit(),
            "date": date.today().isoformat(),
            "command": command,
            "machine": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
            "packages": ", ".join(f"{name} {number}" for name, number in installed.items() if number),
        }
        folder.mkdir(parents=True, exist_ok=True)
        parts = parts_before(folder, facts)
        if not parts:
            (folder / _LOG).unlink(missing_ok=True)
        return Report(folder, facts, parts)

    def add(self, name: str, result: Result, output: str = "") -> None:
        """Add a part and write the files at once: the next part may crash the machine."""
        self.parts[name] = result
        with (self.folder / _LOG).open("a", encoding="utf-8") as log:
            log.write(f"\n======== {name}: {result.outcome}, {result.seconds} s\n{output}")
        (self.folder / _FILE).write_text(self.markdown(), encoding="utf-8")
        parts = {part_name: asdict(part) for part_name, part in self.parts.items()}
        data = json.dumps({"facts": self.facts, "parts": parts}, indent=1, ensure_ascii=False)
        (self.folder / _DATA).write_text(f"{data}\n", encoding="utf-8")

    def markdown(self) -> str:
        lines = ["# GPU check", "", *(f"* {label}: {value}" for label, value in self.facts.items()), ""]
        lines += ["| part | outcome | seconds | tests |", "|---|---|---|---|"]
        for name, part in self.parts.items():
            lines.append(f"| {name} | {part.outcome} | {part.seconds} | {part.tests} |")
        for name, part in self.parts.items():
            if part.values:
                values = [json.dumps(value, ensure_ascii=False) for value in part.values]
                lines += ["", f"## {name}", "", "```json", *values, "```"]
        return "\n".join(lines) + "\n"


def parts_before(folder: Path, facts: Mapping[str, str]) -> dict[str, Result]:
    """Return the parts of the folder's report if it has the same commit, machine and packages; otherwise empty.

    Two unknown commits may differ.
    """
    try:
        previous = json.loads((folder / _DATA).read_text(encoding="utf-8"))
        if facts["commit"] == UNKNOWN or any(previous["facts"][name] != facts[name] for name in _SAME):
            return {}
        return {name: Result(**part) for name, part in previous["parts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no report, or one of another version
        return {}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_NAMES = [part.name for group in plan(Path(), Path(), has_gpu=True) for part in group]


def _add_arguments(parser: ArgumentParser) -> None:
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


def _check(options: Namespace, console: Console) -> int:
    end_s = time.monotonic() + options.within
    print("loading PyTorch …", file=sys.stderr, flush=True)
    import torch

    has_gpu = torch.cuda.is_available()
    report = Report.begin(shlex.join(sys.argv), options.output)
    with interruptible(), _scratch(options.models) as (models, scratch), _clocks(options.output):
        try:
            for group in plan(models, scratch, has_gpu=has_gpu):
                outputs = _run([part for part in group if part.name in options.only], scratch, report, end_s)
                if "CUDA error" in outputs.get("kernels", "") and shutil.which("compute-sanitizer"):
                    _run([sanitized()], scratch, report, end_s)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"results of finished parts are in {options.output / _FILE}")
            raise
    print(report.markdown())
    return int(any(part.outcome.startswith("FAILED") for part in report.parts.values()))


def _run(parts: list[Part], scratch: Path, report: Report, end_s: float) -> dict[str, str]:
    """Run parts at the same time, add each result as its part ends, and return the outputs.

    end_s: end of the check on the monotonic clock.
    """
    running: dict[str, tuple[Part, subprocess.Popen[bytes], float]] = {}
    outputs: dict[str, str] = {}
    try:
        for part in parts:
            begun = time.monotonic()
            if part.needs_checkout and CHECKOUT is None:
                report.add(part.name, Result(f"{_SKIPPED}: needs a checkout with the tests and the benchmarks"))
            elif part.package and _version(part.package) is None:
                report.add(part.name, Result(f"{_SKIPPED}: {part.package} is not installed"))
            elif end_s - begun < _LEAST_S:
                report.add(part.name, Result(f"{_SKIPPED}: no time left"))
            else:
                print(f"{part.name} …", file=sys.stderr, flush=True)
                running[part.name] = part, _start(part, scratch / f"{part.name}.log"), begun
        while running:
            for name, (part, process, begun) in list(running.items()):
                now, status = time.monotonic(), process.poll()
                limit_s = min(part.limit_s, end_s - begun)
                if status is None and now - begun < limit_s:
                    continue
                end_processes(name)
                del running[name]
                late = f"FAILED: stopped at its limit of {limit_s:.0f} s"
                outcome = late if status is None else f"FAILED: exit status {status}" if status else _PASSED
                output = outputs[name] = (scratch / f"{name}.log").read_text(encoding="utf-8", errors="replace")
                report.add(name, read_output(outcome, now - begun, output), output)
                _print_result(name, report.parts[name], output)
            time.sleep(0.1)
    finally:
        for name in running:
            end_processes(name)
    return outputs


def _start(part: Part, log: Path) -> subprocess.Popen[bytes]:
    """Start a part in the checkout, if there is one, with its output in `log`.

    A pipe might never close if a process hangs in the driver. Raises OSError if the command does not exist.
    """
    environment = {
        **os.environ,
        "TORCHINDUCTOR_COMPILE_THREADS": "4",  # otherwise each compiling process starts a thread per core
        "PYTHONPATH": os.pathsep.join(
            [*([] if CHECKOUT is None else [str(CHECKOUT)]), os.environ.get("PYTHONPATH", "")]
        ),
        "PYTHONUNBUFFERED": "1",
        _MARK: _mark_of(part.name),
    }
    if part.is_interpreted:
        environment["TRITON_INTERPRET"] = "1"
    with log.open("wb") as sink:
        return subprocess.Popen(
            part.command,
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_processes(name: str) -> None:
    """Kill a part's remaining processes and wait a few seconds for them to end, as the next part needs their GPU
    memory.
    """
    limit = time.monotonic() + _ENDED_S
    while (processes := _processes_of(name)) and time.monotonic() < limit:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.2)


def _processes_of(name: str) -> list[psutil.Process]:
    """Return a part's processes, in all sessions. Ended processes have no environment."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == _mark_of(name):
                processes.append(process)
    return processes


def _mark_of(name: str) -> str:
    """Return the value of the mark, unique among checks on this machine."""
    return f"{os.getpid()} {name}"


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


COMMAND = Command(
    __doc__,
    f"""\
The parts are {", ".join(_NAMES)}. Each has its own time limit, and a failed part does not stop the next ones. Results
are written after each part, all output to one log. The exit status is 1 if a part failed. Without a GPU the parts are
small, and parts that need one are skipped. Parts that are not run keep the results of an earlier check of the same
commit, packages and machine in the folder.

examples:
  nemo-opd check                                everything that fits into eight minutes
  nemo-opd check --only step --within 120       one part again
""",
    _add_arguments,
    _check,
)
