"""Verbs that write pages about finished runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.errors import ConfigError, DataError, OPDError
from nemo_opd.logging.activity import print_line
from nemo_opd.logging.terminal import VisibleConsole

if TYPE_CHECKING:
    from nemo_opd.logging import ClosingTable


def _add_report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run's directory, or a folder with several")


def _report(arguments: Namespace, console: Console) -> None:
    """Write the report of a run or a sweep. Raises DataError if the folder has no run, or a damaged file."""
    folder: Path = arguments.folder
    if (folder / "metrics.jsonl").is_file():
        from nemo_opd.logging.report import write_report

        print(f"report  {write_report(folder, _closing_of(folder))}")
    elif any(folder.glob("*/config.yaml")):
        report_sweep(folder, ())
    else:
        raise DataError(f"{folder}: neither a run (there is no metrics.jsonl) nor a folder with runs; name either")


def report_sweep(root: Path, names: Sequence[str]) -> None:
    """Print a table of a sweep's runs and write `root`/report.html, if any run has started."""
    # matplotlib is slow to import, and few commands are sweeps
    from nemo_opd.logging.comparison import headline_measures, read_sweep, sweep_table, write_comparison

    runs = read_sweep(root, names)
    if not any(run.has_started for run in runs):
        return
    with suppress(OSError):
        VisibleConsole().print(sweep_table(runs, headline_measures(runs)))
    page = root / "report.html"
    write_comparison(page, runs)
    print_line(f"report  {page}")


def _closing_of(folder: Path) -> ClosingTable | None:
    """Return the closing table up to the run's last record; None if its settings are of another version."""
    from yaml import YAMLError

    from nemo_opd.checkpoint.run_directory import checkpoints_of
    from nemo_opd.config.load import from_yaml
    from nemo_opd.logging.base import Best
    from nemo_opd.logging.loggers import read
    from nemo_opd.logging.metrics import BITS_PER_BYTE
    from nemo_opd.training.closing import closing_table

    try:
        config = from_yaml(folder / "config.yaml")
    except (OSError, OPDError, YAMLError):
        return None
    records = read(folder / "metrics.jsonl")
    start = next((record for record in records if not record["step"]), {})
    best, metric = None, config.train.keep_best and config.train.keep_best.metric
    with suppress(OPDError):  # only checkpoints have these figures
        newest = checkpoints_of(config, folder).newest(hashed=False)
        if newest and metric and newest.progress.best.values and (folder / "best").is_dir():
            step, value = next(iter(newest.progress.best.values.items()))
            best = Best(metric, int(step), value)
    validated = [record for record in records if record["step"] and BITS_PER_BYTE in record]
    last = validated[-1] if validated else {}
    table = closing_table(config, folder, start, last, int(last.get("step", 0)))
    return replace(table, best=best)


REPORT = Command(
    "Rewrites the report of a run from its files, or one page over all the runs in a folder.",
    """\
A run that is still going, or was ended early, is reported as far as it got.

examples:
  nemo-opd report outputs/demo/2026-11-23_00-28-59       report/ of the run
  nemo-opd report outputs/demo                           a table over its runs, and report.html in the same folder
""",
    _add_report_arguments,
    _report,
)


_MOST_MEASURES = 4
"""Measures in a terminal; the page has all."""


def _add_compare_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="a run's directory")
    parser.add_argument(
        "--output", type=Path, default=Path("comparison.html"), metavar="FILE", help="the page (default: %(default)s)"
    )


def _compare(arguments: Namespace, console: Console) -> None:
    """Write the page and print its table.

    Raises ConfigError if the page's name has no suffix, as the folder of its curves would have the same name, and
    DataError if a folder is not a run or has a damaged file.
    """
    if not arguments.output.suffix:
        raise ConfigError(f"--output {arguments.output}: its curves are in a folder of this name; add .html to it")
    for folder in arguments.folders:
        if not (folder / "metrics.jsonl").is_file():
            raise DataError(f"{folder}: not a run (there is no metrics.jsonl); name directories of runs")
    # matplotlib and transformers are slow to import
    from nemo_opd.logging.comparison import measures_of, read_runs, sweep_table, unlike, write_comparison
    from nemo_opd.training.closing import answer_tables, comparison_sentences

    runs = read_runs(arguments.folders)
    sentences = comparison_sentences(runs)
    for sentence in sentences:
        console.print(sentence, style="bold", markup=False, highlight=False)
    console.print(sweep_table(runs, measures_of(runs)[:_MOST_MEASURES], "Runs"))
    for sentence in unlike(runs):
        console.print(f"not alike  {sentence}", style="yellow", markup=False, highlight=False)
    write_comparison(arguments.output, runs, answer_tables(runs), sentences, instead="name another --output")
    print(f"report  {arguments.output}")


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
