"""Rewrites the report of a run from its files, or one page over all the runs in a folder."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.errors import DataError

EPILOG = """\
A run that is still going, or was ended early, is reported as far as it got.

examples:
  nemo-opd report outputs/demo/2026-11-23_00-28-59       report/ of the run
  nemo-opd report outputs/demo                           a table over its runs, and report.html in the same folder
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run's directory, or a folder with several")


def report(arguments: Namespace, console: Console) -> None:
    """Write the report of a run or a sweep. Raises DataError if the folder has no run, or a damaged file."""
    folder: Path = arguments.folder
    if (folder / "metrics.jsonl").is_file():
        from nemo_opd.cli.finished import closing_of
        from nemo_opd.logging.report import write_report

        print(f"report  {write_report(folder, closing_of(folder))}")
    elif any(folder.glob("*/config.yaml")):
        from nemo_opd.cli.settings_command import report_sweep

        report_sweep(folder, ())
    else:
        raise DataError(f"{folder}: neither a run (there is no metrics.jsonl) nor a folder with runs; name either")


COMMAND = Command(__doc__, EPILOG, add_arguments, report)
