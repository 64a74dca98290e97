"""A verb with options."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from nemo_opd.cli.process import exit_status, standard_streams
from nemo_opd.errors import OPDError


@dataclass(frozen=True)
class Command:
    """A task with options; `add_arguments` defines them, and `task` returns the exit status, or None for 0."""

    description: str | None
    epilog: str
    add_arguments: Callable[[ArgumentParser], None]
    task: Callable[[Namespace, Console], int | None]

    def run(self, program: str, arguments: Sequence[str]) -> int:
        """Return the exit status. Raises SystemExit for wrong arguments and, after its line on stderr, for an error."""
        parser = ArgumentParser(
            program, description=self.description, epilog=self.epilog, formatter_class=RawDescriptionHelpFormatter
        )
        self.add_arguments(parser)
        with standard_streams():
            given = parser.parse_args(arguments)
            with exit_status("nothing was written", expected=(OPDError, OSError)):
                return self.task(given, Console()) or 0
