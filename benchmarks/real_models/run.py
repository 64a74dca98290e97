"""Run what is missing of the real-model benchmark, in order: first one seed of everything, then further seeds.

uv run --with trl python -m benchmarks.real_models.run                # all
uv run --with trl python -m benchmarks.real_models.run --only prune   # of one experiment; or names of settings
python -m benchmarks.real_models.run --device cuda --only gemma_ce gemma_drop --seeds 0 --within 480 --results DIR

On a GPU rows are longer, batches larger, and a run has 450 steps; only `languages` has such runs. A run is a process of
one thread. One that broke off continues from its newest checkpoint, one with a result is not repeated.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.real_models.one import run_one
from benchmarks.real_models.outcomes import Outcome, result_file
from benchmarks.real_models.place import ROOT, Place
from benchmarks.real_models.settings import LATER_SEEDS, ON_GPU, SETTINGS, Setting, Size

RESULTS = ROOT / "benchmarks" / "results" / "real_models"
_ENDED_S = 20.0
"""Seconds in which a run writes its checkpoint after it is told to end."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", type=Path, default=ROOT / "outputs" / "real_models", help="where `prepare` wrote")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="experiments or settings")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name in ("steps", "rows", "max-length", "on-policy-steps"):
        parser.add_argument(f"--{name}", type=int, help=f"(default: {_defaults(name)})")
    parser.add_argument("--dtype", help=f"of the student (default: {Size.dtype})")
    parser.add_argument("--until", help="begin no run after this time, HH:MM")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="end the run then, and begin no other")
    parser.add_argument("--one", nargs=2, metavar=("SETTING", "SEED"), help="this run, in this process")
    return parser.parse_args(given)


def _defaults(name: str) -> str:
    field = name.replace("-", "_")
    return f"{getattr(Size(), field)}, with --device cuda {getattr(ON_GPU, field)}"


def planned(seeds: Sequence[int], only: Sequence[str] | None) -> list[tuple[Setting, int]]:
    """Return the runs in order: the first seed of all settings, then each further seed of some."""
    chosen = [each for each in SETTINGS if only is None or {each.experiment, each.name} & set(only)]
    later = [each for name in LATER_SEEDS for each in chosen if each.name in LATER_SEEDS[name]]
    return [(each, seeds[0]) for each in chosen] + [(each, seed) for seed in seeds[1:] for each in later]


def main() -> None:
    options, console = arguments(), Console(highlight=False)
    place, size = Place(options.place.resolve()), size_of(options)
    if not place.facts.exists():
        raise SystemExit(f"error: {place.root} is not prepared; run `python -m benchmarks.real_models.prepare` before")
    if options.one:
        setting = next(each for each in SETTINGS if each.name == options.one[0])
        run_one(setting, int(options.one[1]), size, place, options.results)
        return
    failed = 0
    end_s = math.inf if options.within is None else time.monotonic() + options.within
    for setting, seed in planned(options.seeds, options.only):
        if result_file(options.results, setting.experiment, setting.name, seed).exists():
            continue
        if options.until and time.strftime("%H:%M") >= options.until:
            console.print(f"{options.until}: what is missing is left for another time")
            break
        if time.monotonic() >= end_s:
            console.print(f"{options.within:.0f} s are over: what is missing is left for another time")
            break
        failed += execute(setting, seed, place, options.results, console, end_s)
    sys.exit(1 if failed else 0)


def size_of(options: argparse.Namespace) -> Size:
    given = {name: getattr(options, name) for name in ("steps", "rows", "max_length", "on_policy_steps", "dtype")}
    base = ON_GPU if options.device == "cuda" else Size()
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def execute(
    setting: Setting, seed: int, place: Place, results: Path, console: Console, end_s: float = math.inf
) -> bool:
    """Run one in a process of its own; return whether it failed. end_s: on the monotonic clock, when it is ended."""
    log = place.run(setting.experiment, setting.name, seed).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.real_models.run", *sys.argv[1:], "--one", setting.name, str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        status = _wait(process, end_s)
    outcome = f"failed, see {log}" if status else f"done in {time.monotonic() - began:.0f} s"
    if status is None:
        outcome = "ended, as the time is over; it continues from its newest checkpoint"
    elif not status:
        outcome += _change(result_file(results, setting.experiment, setting.name, seed))
    console.print(f"{time.strftime('%H:%M:%S')} {setting.name}, seed {seed}: {outcome}")
    return bool(status)


def _wait(process: subprocess.Popen[bytes], end_s: float) -> int | None:
    """Return the exit status, or None if the process had to be ended."""
    try:
        return process.wait(None if end_s == math.inf else max(0.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(_ENDED_S)
    except subprocess.TimeoutExpired:
        process.kill()
    return None


def _change(file: Path) -> str:
    """Return bits per byte before and after the run, if it has measured them."""
    outcome = Outcome(**json.loads(file.read_text(encoding="utf-8")))
    if "all" not in outcome.end:
        return ""
    return f", {outcome.start['all']:.4f} to {outcome.end['all']:.4f} bits per byte"


if __name__ == "__main__":
    main()
