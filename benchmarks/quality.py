"""Which loss brings what: every mode on the demo pair and cross-entropy alone, at equal steps, over seeds.

uv run benchmarks/quality.py                   # runs what is missing, then writes benchmarks/results/quality.*
uv run benchmarks/quality.py --report-only     # writes the results from the runs that are there

A run has the folder OUTPUT/SETTING/seed_SEED. One that is whole is not repeated; one that broke off begins again.
"""

import argparse
import signal
import sys
from datetime import date
from pathlib import Path

from demo import commit, hardware
from quality_report import facts_of, rows, table, write
from quality_runs import ROOT, Outcome, Run, RunError, Runner, finished
from quality_settings import COMMON, CONTROL, SETTINGS, STEPS, Setting
from rich.console import Console

from nemo_opd.cluster.placement import num_cores

COMMAND = "uv run benchmarks/quality.py"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS, help="of every run (default: %(default)s)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"run these and {CONTROL}; the table has all that are there. Of {', '.join(names)}",
    )
    parser.add_argument("--jobs", type=int, default=num_cores(), help="runs at a time (default: one per core)")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "quality", help="where the runs' folders are")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where the table goes")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.jobs < 1 or options.steps < 1 or min(options.seeds) < 0:
        parser.error("--jobs and --steps are 1 or more, --seeds 0 or more")
    options.seeds = sorted(set(options.seeds))
    return options


def run_of(setting: Setting, seed: int, steps: int, output: Path) -> Run:
    name = f"run.name=quality_{setting.name}"
    overrides = (*COMMON, *setting.overrides, name, f"run.seed={seed}", f"train.max_steps={steps}")
    return Run(setting.name, seed, overrides, output.resolve() / setting.name / f"seed_{seed}")


def execute(runs: list[Run], jobs: int, console: Console) -> int:
    """Runs what is not whole yet; how many failed."""
    waiting = [run for run in runs if finished(run) is None]
    failed = ended = 0
    console.print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them there already, {jobs} at a time")

    def done(run: Run, result: Outcome | RunError) -> None:
        nonlocal failed, ended
        ended += 1
        lead = f"{ended}/{len(waiting)}  {run.setting}, seed {run.seed}:"
        if isinstance(result, RunError):
            failed += 1
            console.print(f"{lead} failed, {result}\n  see {run.log}", style="red", markup=False, soft_wrap=True)
        else:
            end = result.end
            console.print(f"{lead} {end.bits_per_byte:.4f} bits per byte, {end.accuracy:.4f}, {result.wall_s:.0f} s")

    Runner(jobs, hardware(), commit).run(waiting, done)
    return failed


def main() -> None:
    options = arguments()
    console = Console(highlight=False)
    # without this the runs would go on alone
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runs = [run_of(setting, seed, options.steps, options.output) for seed in options.seeds for setting in SETTINGS]
    wanted = [run for run in runs if run.setting in {CONTROL, *options.only}]
    failed = 0 if options.report_only else execute(wanted, options.jobs, console)
    outcomes = [outcome for run in runs if (outcome := finished(run)) is not None]
    given = rows(SETTINGS, outcomes, options.seeds)
    now = {"date": date.today().isoformat(), "command": COMMAND}
    write(options.results, given, outcomes, facts_of(outcomes, options.steps, options.seeds, now))
    console.print(table(given), markup=False, soft_wrap=True)
    missing = sum(finished(run) is None for run in wanted)
    if missing:
        console.print(f"error: {missing} of {len(wanted)} runs are missing ({failed} failed just now)", style="red")
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(f"interrupted; `{COMMAND}` goes on with the runs that are not whole")
