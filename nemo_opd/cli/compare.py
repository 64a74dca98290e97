"""Writes one page about several runs: results with intervals, curves, the settings that differ."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.errors import ConfigError, DataError

EPILOG = """\
Answers to shared questions are compared one by one with the first run's answers. A run that is still going,
or was ended early, is compared as far as it got.

examples:
  nemo-opd compare outputs/demo/A outputs/demo/B                  comparison.html in the current directory
  nemo-opd compare outputs/lr/* --output outputs/lr/page.html
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="a run's directory")
    parser.add_argument(
        "--output", type=Path, default=Path("comparison.html"), metavar="FILE", help="the page (default: %(default)s)"
    )


def compare(arguments: Namespace, console: Console) -> None:
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
    from nemo_opd.logging.comparison import read_runs, write_comparison
    from nemo_opd.logging.sweep import sweep_table
    from nemo_opd.training.compared_runs import answer_tables

    runs = read_runs(arguments.folders)
    console.print(sweep_table(runs, "Runs"))
    write_comparison(arguments.output, runs, answer_tables(runs))
    print(f"report  {arguments.output}")


COMMAND = Command(__doc__, EPILOG, add_arguments, compare)
