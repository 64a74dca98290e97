"""Run what is missing of the real-model benchmark, in order: first one seed of everything, then further seeds.

uv run --with trl python -m benchmarks.real_models.run                # all
uv run --with trl python -m benchmarks.real_models.run --only prune   # of one experiment; or names of settings

A run is a process of one thread. One that broke off continues from its newest checkpoint, one with a result is not
repeated.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.real_models.one import run_one
from benchmarks.real_models.outcomes import result_file
from benchmarks.real_models.place import ROOT, Place
from benchmarks.real_models.settings import LATER_SEEDS, SETTINGS, Setting, Size

RESULTS = ROOT / "benchmarks" / "results" / "real_models"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    size = Size()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", type=Path, default=ROOT / "outputs" / "real_models", help="where `prepare` wrote")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="experiments or settings")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=size.steps, help="of texts (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=size.rows, help="of a step (default: %(default)s)")
    parser.add_argument("--on-policy-steps", type=int, default=size.on_policy_steps, help="(default: %(default)s)")
    parser.add_argument("--dtype", default=size.dtype, help="of the student (default: %(default)s)")
    parser.add_argument("--until", help="begin no run after this time, HH:MM")
    parser.add_argument("--one", nargs=2, metavar=("SETTING", "SEED"), help="this run, in this process")
    return parser.parse_args(given)


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
    for setting, seed in planned(options.seeds, options.only):
        if result_file(options.results, setting.experiment, setting.name, seed).exists():
            continue
        if options.until and time.strftime("%H:%M") >= options.until:
            console.print(f"{options.until}: what is missing is left for another time")
            break
        failed += execute(setting, seed, place, console)
    sys.exit(1 if failed else 0)


def size_of(options: argparse.Namespace) -> Size:
    return Size(options.steps, options.rows, on_policy_steps=options.on_policy_steps, dtype=options.dtype)


def execute(setting: Setting, seed: int, place: Place, console: Console) -> bool:
    """Run one in a process of its own; return whether it failed."""
    log = place.run(setting.experiment, setting.name, seed).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.real_models.run", *sys.argv[1:], "--one", setting.name, str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    with log.open("wb") as output:
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    outcome = f"failed, see {log}" if status else f"done in {time.perf_counter() - began:.0f} s"
    console.print(f"{time.strftime('%H:%M:%S')} {setting.name}, seed {seed}: {outcome}")
    return status != 0


if __name__ == "__main__":
    main()
