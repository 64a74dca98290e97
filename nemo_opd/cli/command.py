"""Verbs with options."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from nemo_opd.cli.process import exit_status, standard_streams
from nemo_opd.errors import OPDError


@dataclass(frozen=True)
class Command:
    """A task with options, defined by `add_arguments`; `task` returns the exit status, or None for 0."""

    description: str | None
    epilog: str
    add_arguments: Callable[[ArgumentParser], None]
    task: Callable[[Namespace, Console], int | None]

    def run(self, program: str, arguments: Sequence[str]) -> int:
        """Run the task and return the exit status.

        Raises SystemExit for wrong arguments, and for an error after printing it on stderr.
        """
        parser = ArgumentParser(
            program, description=self.description, epilog=self.epilog, formatter_class=RawDescriptionHelpFormatter
        )
        self.add_arguments(parser)
        with standard_streams():
            options = parser.parse_args(arguments)
            with exit_status("nothing was written", expected=(OPDError, OSError)):
                return self.task(options, Console()) or 0
