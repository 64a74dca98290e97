"""The verb that lists runs."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from nemo_opd.cli.command import Command, add_output_options, output_of, print_plain
from nemo_opd.errors import DataError
from nemo_opd.logging.base import change, score

if TYPE_CHECKING:
    from nemo_opd.training.finished import RunFacts

_MOST_STEPS = 10**12
"""More steps than any run takes; a damaged file may have a number of any length."""
_HEADS = ("status", "step", "bits per byte", "teacher", "run")


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("outputs"), metavar="FOLDER", help="default: %(default)s"
    )
    add_output_options(parser)


def _list(arguments: Namespace, console: Console) -> None:
    """Print a line for each run. Raises DataError if the folder has none."""
    with output_of(arguments) as print_json:
        from nemo_opd.training.finished import find_runs, read_facts  # imports matplotlib and transformers

        runs = [read_facts(folder) for folder in find_runs(arguments.folder)]
        if not runs:
            problem = "there is no run in it" if arguments.folder.is_dir() else "it is not a folder"
            raise DataError(f"{arguments.folder}: {problem}; name a folder with runs, such as outputs/demo")
        rows = [_HEADS, *map(_row, runs)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print_plain(console, "  ".join(cells).rstrip())
        print_json({"runs": runs})


def _row(run: "RunFacts") -> tuple[str, ...]:
    total = "" if run.total_steps is None else f"/{_steps(run.total_steps)}"
    if run.problem is not None:
        return "damaged", f"?{total}", "", "", f"{run.folder}: {run.problem}"
    effect = "" if run.results is None else run.results.verdict.teacher_effect
    return run.status, f"{_steps(run.step)}{total}", ", ".join(_results(run)), effect, str(run.folder)


def _steps(number: int) -> str:
    return f"{number:,}" if number < _MOST_STEPS else "?"


def _results(run: "RunFacts") -> Iterator[str]:
    """Yield the student's bits per byte after the run, or its first score, and whether it got worse."""
    if run.results is None:
        return
    after = run.results.after
    if after is not None and after.bits_per_byte is not None:
        gain = change(run.results.change(after))
        yield f"{after.bits_per_byte:.4f}" + (f" ({gain})" if gain else "")
    else:
        for row in run.results.shown_scores[:1]:
            yield f"{row.measure} {score(*row.after, is_share=row.is_share)}"
    if run.results.verdict.is_worse:
        yield "worse than before"


COMMAND = Command(
    "Lists runs: status, step, the student's bits per byte (change since before training), whether its teacher helped.",
    """\
Runs are found at any depth. Their status is running, finished, ended early (with a checkpoint), interrupted,
failed, or killed, if nothing else is recorded.

examples:
  nemo-opd runs                         all runs in outputs
  nemo-opd runs outputs/demo --json     one JSON object, with verdicts and figures
""",
    _add_arguments,
    _list,
)
