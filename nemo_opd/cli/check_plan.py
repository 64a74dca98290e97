"""Plan of the check: its parts in their order, with their commands and time limits."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_opd.paths import CHECKOUT

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
