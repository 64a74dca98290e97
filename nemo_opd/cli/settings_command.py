"""Verbs whose arguments are settings, composed by Hydra."""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_opd.cli.keys import complete_recipe, complete_setting
from nemo_opd.cli.process import exit_status, standard_streams
from nemo_opd.config.base import Settings
from nemo_opd.config.load import S, run_with_hydra
from nemo_opd.logging.busy import print_line
from nemo_opd.paths import configs_dir
from nemo_opd.training.interrupt import interruptible, was_requested


@dataclass(frozen=True)
class SettingsCommand:
    """A task that receives validated settings."""

    model: type[Settings]
    config_name: Callable[[Sequence[str]], str]
    """Returns the recipe to start from if no `--config` names one. Called with the arguments."""
    task: Callable[[Any], None]

    def run(self, program: str, arguments: Sequence[str]) -> int:
        """Run the task and return the exit status. Raises SystemExit for an error, after printing it on stderr."""
        sys.argv = [program, *arguments]  # Hydra reads it
        main(self.task, self.model, config_dir=configs_dir(), config_name=self.config_name(arguments))
        return 0

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Define the arguments that a shell can complete."""
        config: Any = parser.add_argument("--config", metavar="FILE")
        config.completer = lambda prefix, **_: complete_recipe(prefix, configs_dir())
        parser.add_argument("--cfg", choices=("job", "hydra", "all"))
        parser.add_argument("--multirun", "-m", action="store_true")
        settings: Any = parser.add_argument("settings", nargs="*")
        settings.completer = lambda prefix, **_: complete_setting(prefix, self.model, configs_dir())


def main(task: Callable[[S], None], model: type[S], *, config_dir: Path, config_name: str) -> None:
    """Run `task` with the command line's settings. An error ends with one clear line and exit status 1."""
    with standard_streams(), interruptible(), exit_status("nothing was saved since it started"):
        run_with_hydra(
            task,
            model,
            config_dir=config_dir,
            config_name=config_name,
            after_sweep=report_sweep,
            is_interrupted=was_requested,
        )


def report_sweep(root: Path, names: Sequence[str]) -> None:
    """Print a table of a sweep's runs and write `root`/report.html, if any run has started."""
    # matplotlib is slow to import, and few commands are sweeps
    from nemo_opd.logging.sweep import read_sweep, sweep_table, write_sweep_report

    runs = read_sweep(root, names)
    if not any(run.has_started for run in runs):
        return
    with suppress(OSError):
        Console().print(sweep_table(runs))
    print_line(f"report  {write_sweep_report(root, runs)}")
