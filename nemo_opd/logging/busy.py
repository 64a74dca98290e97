"""What takes a while outside of a run's steps, shown to people."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from rich.console import Console

from nemo_opd.config.logging import Console as Settings
from nemo_opd.logging.ticker import Ticker
from nemo_opd.logging.work_line import WorkLine, work_line
from nemo_opd.progress import current, working

INTERVAL_S: float = Settings.model_fields["interval_s"].default


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Shows inside what is being done: live in a terminal, elsewhere by a line now and then.

    A terminal is looked for at stderr and the lines go to stdout, so a command whose output is redirected has both.
    """
    with ExitStack() as stack:
        terminal = Console(stderr=True)
        if terminal.is_terminal:
            stack.enter_context(terminal.status(WorkLine()))
        if not sys.stdout.isatty():
            with suppress(OSError):
                print(what, flush=True)
            stack.enter_context(Ticker(say_what_is_done, INTERVAL_S))
        stack.enter_context(working(what))
        yield


def say_what_is_done() -> None:
    if (work := current()) is not None:
        print(work_line(work), flush=True)
