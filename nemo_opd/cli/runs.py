"""Verbs that list runs, and write pages about them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from nemo_opd.cli.command import Command, add_output_options, output_of, print_plain
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.logging.interface import change, score
from nemo_opd.logging.terminal import VisibleConsole, print_line, print_warning, visible

if TYPE_CHECKING:
    from nemo_opd.training.finished import RunFacts


_MOST_MEASURES = 4
"""Measures in a terminal; the page has all."""
_MOST_STEPS = 10**12
"""More steps than any run takes; a damaged file may have a number of any length."""
_HEADS = ("status", "step", "bits per byte or score", "teacher", "run")


def _add_report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run's folder, or one with runs or evaluations")
    add_output_options(parser)


def _report(arguments: Namespace, _: Console) -> None:
    """Write the report of a run or a sweep. Raises DataError if the folder has no run, or a damaged file."""
    with output_of(arguments) as print_json:
        print_json(_write_report(arguments.folder))


def _write_report(folder: Path) -> object:
    """Write the report of a run or a sweep and return its facts."""
    is_run = (folder / "metrics.jsonl").is_file()
    if not is_run and not any(folder.glob("*/config.yaml")):
        raise DataError(f"{folder}: neither a run (there is no metrics.jsonl) nor a folder with runs; name either")
    # matplotlib and transformers are slow to import
    from nemo_opd.logging.comparison import folders_of_runs
    from nemo_opd.logging.report import write_report
    from nemo_opd.training.finished import read_facts

    if not is_run:
        report_sweep(folder, ())
        return {"report": folder / "report.html", "runs": [read_facts(run) for run in folders_of_runs(folder)]}
    facts = read_facts(folder)
    if facts.problem is not None:
        raise DataError(facts.problem)
    if facts.results is None:
        config = folder / "config.yaml"
        reason = "is not the configuration of a run of this version" if config.exists() else "does not exist"
        print_warning(f"{config} {reason}, so the report has no table of results and no verdict")
    report = write_report(folder, facts.results)
    print(visible(f"report  {report}"))
    return replace(facts, report=report)


def report_sweep(root: Path, names: Sequence[str]) -> None:
    """Print a table of a sweep's runs and write `root`/report.html, if any run has started."""
    # matplotlib is slow to import, and few commands are sweeps
    from nemo_opd.logging.comparison import (
        headline_measures,
        read_sweep,
        setting_tables,
        sweep_table,
        terminal_table,
        write_comparison,
    )

    runs = read_sweep(root, names)
    if not any(run.has_started for run in runs):
        return
    with suppress(OSError):
        VisibleConsole().print(terminal_table(sweep_table(runs, headline_measures(runs))))
    page = root / "report.html"
    write_comparison(page, runs, setting_tables(runs))
    print_line(f"report  {page}")


REPORT = Command(
    "Rewrites the report of a run from its files, or one page over all the runs in a folder.",
    """\
A run that is still going, or was ended early, is reported as far as it got.

examples:
  nemo-opd report outputs/demo/2026-11-23_00-28-59       report/ of the run
  nemo-opd report outputs/demo                           a table over its runs and evaluations, and report.html
""",
    _add_report_arguments,
    _report,
)


def _add_compare_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="a run's directory")
    parser.add_argument(
        "--output", type=Path, default=Path("comparison.html"), metavar="FILE", help="the page (default: %(default)s)"
    )
    add_output_options(parser)


def _compare(arguments: Namespace, console: Console) -> None:
    with output_of(arguments) as print_json:
        print_json(_write_comparison(arguments, console))


def _write_comparison(arguments: Namespace, console: Console) -> object:
    """Write the page, print its table and return its facts.

    Raises ConfigError for one run, and if the page's name has no suffix, as the folder of its curves would have the
    same name, and DataError if a folder is not a run or has a damaged file.
    """
    if not arguments.output.suffix:
        raise ConfigError(f"--output {arguments.output}: its curves are in a folder of this name; add .html to it")
    for folder in arguments.folders:
        if not (folder / "metrics.jsonl").is_file():
            raise DataError(f"{folder}: not a run (there is no metrics.jsonl); name directories of runs")
    if len({folder.resolve() for folder in arguments.folders}) == 1:
        raise ConfigError(
            f"{arguments.folders[0]}: one run has nothing to compare with; name another, or see nemo-opd report"
        )
    # matplotlib and transformers are slow to import
    from nemo_opd.logging.comparison import (
        measures_of,
        read_runs,
        setting_tables,
        sweep_table,
        terminal_table,
        unlike,
        write_comparison,
    )
    from nemo_opd.training.closing import answer_tables, comparison_sentences
    from nemo_opd.training.finished import read_facts

    runs = read_runs(arguments.folders)
    sentences, remarks, settings = comparison_sentences(runs), unlike(runs), setting_tables(runs)
    tables = [*answer_tables(runs), *settings]
    for sentence in sentences:
        console.print(sentence, style="bold", markup=False, highlight=False)
    for table in (sweep_table(runs, measures_of(runs)[:_MOST_MEASURES]), *settings):
        console.print(terminal_table(table))
    for sentence in remarks:
        console.print(f"not alike  {sentence}", style="yellow", markup=False, highlight=False)
    write_comparison(arguments.output, runs, tables, sentences, instead="name another --output")
    print(f"report  {arguments.output}")
    return {
        "verdicts": sentences,
        "not_alike": remarks,
        "tables": tables,
        "report": arguments.output,
        "runs": [read_facts(run.folder) for run in runs],
    }


COMPARE = Command(
    "Writes one page about several runs: results with intervals, curves, the settings that differ.",
    """\
Answers to shared questions are compared one by one with the first run's answers. A run that is still going,
or was ended early, is compared as far as it got.

examples:
  nemo-opd compare outputs/demo/A outputs/demo/B                  comparison.html in the current directory
  nemo-opd compare outputs/lr/* --output outputs/lr/page.html
""",
    _add_compare_arguments,
    _compare,
)


def _add_runs_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("outputs"), metavar="FOLDER", help="default: %(default)s"
    )
    add_output_options(parser)


def _list_runs(arguments: Namespace, console: Console) -> None:
    """Print a line for each run. Raises DataError if the folder has none."""
    with output_of(arguments) as print_json:
        from nemo_opd.training.finished import find_runs, read_facts  # imports matplotlib and transformers

        runs = [read_facts(folder) for folder in find_runs(arguments.folder)]
        if not runs:
            problem = "there is no such folder"
            if arguments.folder.exists():
                problem = "there is no run in it" if arguments.folder.is_dir() else "it is not a folder"
            raise DataError(f"{arguments.folder}: {problem}; name a folder with runs: nemo-opd runs FOLDER")
        rows = [_HEADS, *map(_row, runs)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print_plain(console, "  ".join(cells).rstrip())
        print_json({"runs": runs})


def _row(run: RunFacts) -> tuple[str, ...]:
    total = "" if run.total_steps is None else f"/{_steps(run.total_steps)}"
    if run.problem is not None:
        return "damaged", f"?{total}", "", "", f"{run.folder}: {run.problem}"
    effect = "" if run.results is None else run.results.verdict.teacher_effect
    return run.status, f"{_steps(run.step)}{total}", ", ".join(_results(run)), effect, str(run.folder)


def _steps(number: int) -> str:
    return f"{number:,}" if number < _MOST_STEPS else "?"


def _results(run: RunFacts) -> Iterator[str]:
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


RUNS = Command(
    "Lists runs: status, step, bits per byte (change since the start) or first score, whether the teacher helped.",
    """\
Runs are found at any depth. Their status is running, finished, ended early (saved a checkpoint), interrupted,
failed, or killed, if nothing else is recorded.

examples:
  nemo-opd runs                         all runs in outputs
  nemo-opd runs outputs/demo --json     one JSON object, with verdicts and figures
""",
    _add_runs_arguments,
    _list_runs,
)
