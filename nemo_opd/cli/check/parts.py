"""The parts of the check: commands, in the order in which their numbers matter, each with its limit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_opd.paths import CHECKOUT

_MFU_FLOOR = "0.3"
_LARGE = ("--student", "llama_1b", "--same-teacher", "llama_3b", "--teacher", "qwen_4b", "--length", "2048")
_TINY = ("--student", "llama_tiny", "--same-teacher", "llama_tiny", "--teacher", "qwen_tiny", "--length", "32")
_SLOWER = 5
"""Times the limits without a GPU: that machine has few cores too, and all parts spend most of their time on imports."""
_RUNS = "tests/training"
"""Tests of whole runs, which take as long as all other ones together."""


@dataclass(frozen=True)
class Part:
    """A command in a process of its own. Results are the lines of JSON that it prints; a problem is its exit status."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    is_interpreted: bool = False
    """Triton's kernels run in its interpreter."""

    @property
    def needs_checkout(self) -> bool:
        """Whether it is a script or tests, which are not in the package."""
        return self.command[1:2] != ("-m",) or "pytest" in self.command


def plan(models: Path, scratch: Path, *, has_gpu: bool) -> list[list[Part]]:
    """Return the parts; those of one list run at the same time. Without a GPU they are small.

    models: folder of the models of the measured steps. scratch: for other files.
    """
    positions = "--positions 2048 8192 --budgets 4 2 1 --device cuda" if has_gpu else "--positions 16 --divisor 64"
    parts = [
        [Part("machine", 75, (sys.executable, "-m", "nemo_opd.cli.check.probe"))],
        [Part("models", 100, _step(models, scratch, "--write-only", has_gpu=has_gpu)), _kernels(has_gpu, "check")],
        [Part("step", 110, _step(models, scratch, "--set", "cluster.launcher=local", has_gpu=has_gpu))],
        [
            Part("tests", 150, _pytest(4, "loadfile", without=_RUNS)),
            Part("demos", 160, (sys.executable, "-m", "nemo_opd.cli.check.demos", str(scratch / "demos"))),
        ],
        [_kernels(has_gpu, "time")] if has_gpu else [],
        [Part("losses", 60, _script("losses_floor.py", *positions.split(), "--output", str(scratch)))],
        [Part("ray-step", 120, _step(models, scratch, has_gpu=has_gpu))],
        [Part("plain-step", 75, _script("step_plain.py", str(models)))],
        [Part("runs", 240, _pytest(5, "worksteal", only=_RUNS))],
    ]
    longer = 1 if has_gpu else _SLOWER
    return [[replace(part, limit_s=longer * part.limit_s) for part in together] for together in parts if together]


def sanitized() -> Part:
    """Return the kernels under compute-sanitizer: which one fails, and at which address."""
    return Part(
        "sanitizer", 80, ("compute-sanitizer", "--tool", "memcheck", *_script("losses_kernels.py", "check", "--small"))
    )


def gpu_test_files(root: Path) -> list[str]:
    """Return the files of tests that have some marked `gpu`: others may need libraries that this machine lacks."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(file.relative_to(root)) for file in files if "pytest.mark.gpu" in file.read_text(encoding="utf-8")]


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, f"benchmarks/{name}", *arguments)


def _kernels(has_gpu: bool, what: str) -> Part:
    name, limit_s = {"check": ("kernels", 100), "time": ("kernel-times", 60)}[what]
    return Part(name, limit_s, _script("losses_kernels.py", what), is_interpreted=not has_gpu)


def _step(models: Path, scratch: Path, *more: str, has_gpu: bool) -> tuple[str, ...]:
    sizes = ("--rows", "16", "--micro", "4", "--rounds", "4", "--mfu-floor", _MFU_FLOOR) if has_gpu else ()
    shared = ("--loss", "p_kl", "--without-gold", "--models", str(models), "--output", str(scratch))
    return _script("step.py", *(_LARGE if has_gpu else _TINY), *sizes, *shared, *more)


def _pytest(workers: int, dist: str, *, only: str = "tests", without: str | None = None) -> tuple[str, ...]:
    """Return the command of the tests marked `gpu`. The settings have -q, so that -vv gives a line for each test."""
    files: Sequence[str] = () if CHECKOUT is None else gpu_test_files(CHECKOUT)
    files = [file for file in files if file.startswith(only) and (without is None or not file.startswith(without))]
    how = ("-m", "gpu", "-vv", "-n", str(workers), "--dist", dist, "--tb=short", "-p", "no:cacheprovider")
    return (sys.executable, "-m", "pytest", *how, *files)
