"""What a long run holds on to, and what a killed one loses.

uv run benchmarks/soak.py                      # writes benchmarks/results/soak.md and soak.json

Long runs: the memory, descriptors and threads of every process, and shared memory, from a tenth of the steps to the
end. Killed runs: SIGKILL to the driver and its process group at random moments from the command to the report, then
the same command again at once; the model and the metrics must be those of a run that was left alone, to the last bit.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402

from benchmarks.demo import commit, hardware  # noqa: E402
from nemo_opd.logging.loggers import read  # noqa: E402
from tests.training.launch import MARK, Run  # noqa: E402

COMMAND = "uv run benchmarks/soak.py"
KINDS = ("off_policy", "on_policy")
TINY = {
    "off_policy": [
        "teachers=demo_single",
        "train.global_batch_size=4",
        "train.micro_batch_size=4",
        "train.max_length=64",
        "data.validation.max_samples=8",
    ],
    "on_policy": [
        "train.global_batch_size=8",
        "train.micro_batch_size=8",
        "rollout.n=2",
        "data.validation.max_samples=8",
        "evaluation.sets.held_out.data.max_samples=4",
        "evaluation.n=2",
        "evaluation.k=[1]",
        "evaluation.teachers=false",
    ],
}
LOOK_S = 1.0
"""Seconds between two looks at the processes."""
WARM = 0.1
"""Share of the steps after which what a run needs is there."""
RUN_LIMIT_S = 3600.0
WHOLE = "whole"


@dataclass(frozen=True)
class Look:
    """What one process holds at a step."""

    process: str
    step: int
    rss_mib: float
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Growth:
    """Of one process: medians over the looks of a tenth of the steps, at first when it was warm and at the end."""

    process: str
    rss_mib: tuple[float, float]
    descriptors: tuple[float, float]
    threads: tuple[float, float]


@dataclass(frozen=True)
class Kill:
    kind: str
    at_s: float
    step: int
    """Of metrics.jsonl, when it was killed."""
    had_checkpoint: bool
    is_equal: bool
    problem: str


@contextmanager
def launched(kind: str, overrides: Sequence[str], output_dir: Path) -> Iterator[Run]:
    """The demo in a process group of its own, with its output in a file beside its directory; ended on leaving."""
    mark = uuid.uuid4().hex
    command = [sys.executable, str(ROOT / "examples" / f"run_{kind}_distillation.py")]
    with output_dir.with_suffix(".log").open("a") as log:
        process = subprocess.Popen(
            [*command, *TINY[kind], *overrides, f"run.output_dir={output_dir}"],
            cwd=ROOT,
            env={**os.environ, MARK: mark},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield Run(process, mark, output_dir)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_step(output_dir: Path) -> int:
    try:
        records = read(output_dir / "metrics.jsonl")
    except OSError:
        return 0
    return int(records[-1]["step"]) if records else 0


def long_run(kind: str, steps: int, folder: Path) -> tuple[list[Growth], tuple[float, float]]:
    """The growth of each process, and the MiB of shared memory in use, warm and at the end."""
    looks: list[Look] = []
    shared: list[tuple[int, float]] = []
    overrides = [f"train.max_steps={steps}", f"train.save_every={steps // 4}"]
    with launched(kind, overrides, folder / f"long_{kind}") as run:
        deadline = time.monotonic() + RUN_LIMIT_S
        while run.process.poll() is None and time.monotonic() < deadline:
            step = last_step(run.output_dir)
            found = [look for process in run.processes() if (look := look_at(process, run, step))]
            # After the last step the driver imports what draws the report.
            if step and last_step(run.output_dir) < steps:
                looks += found
                shared.append((step, shared_memory_mib()))
            time.sleep(LOOK_S)
        require_success(kind, run, run.process.poll())
    by_process: dict[str, list[Look]] = defaultdict(list)
    for look in looks:
        by_process[look.process].append(look)
    grown = [growth(name, own, steps) for name, own in by_process.items() if own[0].step <= 2 * WARM * steps]
    return grown, first_and_last(shared, steps)


def look_at(process: psutil.Process, run: Run, step: int) -> Look | None:
    try:
        with process.oneshot():
            memory, threads = process.memory_info().rss / 2**20, process.num_threads()
        return Look(name_of(process, run), step, memory, process.num_fds(), threads)
    except psutil.NoSuchProcess:
        return None


def name_of(process: psutil.Process, run: Run) -> str:
    if process.pid == run.process.pid:
        return "driver"
    names = [Path(word).name for word in run.seen[process.pid].split() if not word.startswith("-")]
    named = next((name for name in names if not name.startswith("python")), "process")
    return f"{named} {process.pid}"


def growth(name: str, looks: Sequence[Look], steps: int) -> Growth:
    def of(field: str) -> tuple[float, float]:
        return first_and_last([(look.step, float(getattr(look, field))) for look in looks], steps)

    return Growth(name, of("rss_mib"), of("descriptors"), of("threads"))


def first_and_last(values: Iterable[tuple[int, float]], steps: int) -> tuple[float, float]:
    """Medians over the tenth of the steps that follows the warm-up, and over the last tenth."""
    every = list(values)
    warm = [value for step, value in every if WARM * steps < step <= 2 * WARM * steps]
    last = [value for step, value in every if (1 - WARM) * steps < step < steps]
    return statistics.median(warm or [every[0][1]]), statistics.median(last or [every[-1][1]])


def shared_memory_mib() -> float:
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize / 2**20


def kills(kind: str, number: int, folder: Path) -> list[Kill]:
    """As many runs that are killed and started again, at moments spread over all of a run that is left alone."""
    overrides = ["train.max_steps=12", "train.save_every=4", "run.resume=auto"]
    with launched(kind, overrides, folder / f"alone_{kind}") as alone:
        began = time.monotonic()
        require_success(kind, alone, alone.process.wait(RUN_LIMIT_S))
    whole_s, expected = time.monotonic() - began, results(alone.output_dir)
    if expected["report"] != WHOLE:
        raise RuntimeError(f"the {kind} run that was left alone has no whole report")
    draw = random.Random(0)
    moments = [(i + draw.random()) / number * whole_s for i in range(number)]
    return [
        killed(kind, overrides, at_s, expected, folder / f"killed_{kind}_{i}")
        for i, at_s in enumerate(track(moments, f"killed runs, {kind}"))
    ]


def killed(kind: str, overrides: Sequence[str], at_s: float, expected: dict[str, str], output_dir: Path) -> Kill:
    with launched(kind, overrides, output_dir) as first, suppress(subprocess.TimeoutExpired):
        try:
            first.process.wait(at_s)
        finally:
            first.processes()
    step, checkpoints = last_step(output_dir), output_dir / "checkpoints"
    had_checkpoint = checkpoints.is_dir() and any(checkpoints.glob("step_*"))
    with launched(kind, overrides, output_dir) as second:
        status = second.process.wait(RUN_LIMIT_S)
    problems = [f"exit status {status}"] if status else []
    found = results(output_dir) if not status else {}
    problems += [f"{name} differs" for name in expected if found and found.get(name) != expected[name]]
    problems += [f"left: {what}" for what in first.leftovers(folders=False) + second.leftovers(folders=False)]
    return Kill(kind, at_s, step, had_checkpoint, not problems, "; ".join(problems))


def results(output_dir: Path) -> dict[str, str]:
    """What must be equal: digests of the model and of the metrics without times; whether the report is whole."""
    found = {
        str(file.relative_to(output_dir)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted((output_dir / "final").glob("*"))
    }
    records = [
        {name: value for name, value in record.items() if not name.startswith("perf/")}
        for record in read(output_dir / "metrics.jsonl")
    ]
    found["metrics"] = hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()
    report = output_dir / "report" / "report.html"
    is_whole = report.exists() and report.read_text(encoding="utf-8").rstrip().endswith("</html>")
    found["report"] = WHOLE if is_whole else "cut"
    return found


def require_success(kind: str, run: Run, status: int | None) -> None:
    if status != 0:
        tail = run.output_dir.with_suffix(".log").read_text()[-2000:]
        raise RuntimeError(f"the {kind} run did not end well (exit status {status}); its log ends with {tail}")


def growth_table(found: Sequence[Growth]) -> list[str]:
    lines = ["| process | RSS MiB | descriptors | threads |", "|---|---|---|---|"]
    for own in sorted(found, key=lambda each: -each.rss_mib[1]):
        cells = [f"{first:.0f} → {last:.0f}" for first, last in (own.rss_mib, own.descriptors, own.threads)]
        lines.append(f"| {own.process} | {' | '.join(cells)} |")
    return lines


def kill_table(found: Sequence[Kill]) -> list[str]:
    lines = ["| run | killed after | at step | had a checkpoint | equal | |", "|---|---|---|---|---|---|"]
    for own in found:
        said = ("yes" if flag else "no" for flag in (own.had_checkpoint, own.is_equal))
        lines.append(f"| {own.kind} | {own.at_s:.1f} s | {own.step} | {' | '.join(said)} | {own.problem} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs=2, default=(2000, 200), help="of the long runs, off- and on-policy")
    parser.add_argument("--kills", type=int, nargs=2, default=(10, 10), help="of runs, off- and on-policy")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    facts = {"hardware": hardware(), "commit": commit(), "date": date.today().isoformat(), "command": COMMAND}
    text, record = ["# A long run, and killed ones", ""], {**facts}
    with tempfile.TemporaryDirectory() as name:
        for kind, steps in zip(KINDS, options.steps, strict=True):
            if steps:
                found, shared = long_run(kind, steps, Path(name))
                text += [f"{steps} steps, {kind}, from a tenth of them to the end:", "", *growth_table(found), ""]
                text += [f"Shared memory of the machine: {shared[0]:.1f} → {shared[1]:.1f} MiB.", ""]
                record[f"long_{kind}"] = {"shared_mib": shared, "processes": [asdict(own) for own in found]}
        every = [kill for kind, number in zip(KINDS, options.kills, strict=True) for kill in
                 (kills(kind, number, Path(name)) if number else [])]  # fmt: skip
    equal = sum(kill.is_equal for kill in every)
    text += [f"Killed and continued: {equal} of {len(every)} are equal to the last bit.", "", *kill_table(every), ""]
    text += [f"* {name}: {value}" for name, value in facts.items()]
    record["kills"] = [asdict(kill) for kill in every]
    (options.output / "soak.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    (options.output / "soak.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    Console().print("\n".join(text))


if __name__ == "__main__":
    main()
