"""Commands with options, and the streams and exit status of their process."""

import io
import json
import logging
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from pydantic_core import to_json
from rich.console import Console

from nemo_opd.cli.main import INTERRUPTED
from nemo_opd.cluster.placement import Processes
from nemo_opd.config.secrets import without_secrets
from nemo_opd.errors import ConfigError, OPDError
from nemo_opd.files import OF_THE_DISK, refusal
from nemo_opd.logging.terminal import (
    VisibleConsole,
    VisibleFormatter,
    between_words,
    visible,
    visible_json,
    without_progress,
)
from nemo_opd.paths import keep_compiled_code_private
from nemo_opd.progress import quiet_libraries

_STDOUT, _STDERR = 1, 2
"""File descriptors."""


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
                return self.task(options, VisibleConsole()) or 0


def add_output_options(parser: ArgumentParser) -> None:
    """Define the options of commands with a result that programs read."""
    parser.add_argument("--json", action="store_true", help="print only the result on stdout, as a JSON object")
    parser.add_argument("--quiet", action="store_true", help="print only warnings and errors")


@contextmanager
def output_of(options: Namespace) -> Iterator[Callable[[object], None]]:
    """Send stdout to stderr in the block with `--json`, or nowhere with `--quiet`, also for child processes.

    Yields a function that prints a value as JSON on the stdout from before; it prints nothing without `--json`.
    """
    if not (options.json or options.quiet):
        yield lambda _: None
        return
    with ExitStack() as stack:
        sys.stdout.flush()
        before = os.fdopen(os.dup(_STDOUT), "w", encoding="utf-8")
        stack.callback(_close_even_if_unread, before)
        stack.callback(os.dup2, before.fileno(), _STDOUT)
        instead = stack.enter_context(open(os.devnull, "w")) if options.quiet else sys.stderr
        os.dup2(instead.fileno() if options.quiet else _STDERR, _STDOUT)  # for child processes
        stack.enter_context(redirect_stdout(instead))
        if options.quiet:
            stack.enter_context(without_progress())
        yield lambda value: _print_even_if_unread(visible_json(_plain(value)), before) if options.json else None


def _print_even_if_unread(text: str, file: TextIO) -> None:
    with suppress(BrokenPipeError):  # when the reader has left
        print(text, file=file, flush=True)


def _close_even_if_unread(file: TextIO) -> None:
    with suppress(BrokenPipeError):
        file.close()


def _plain(value: object) -> object:
    """Return dataclasses and paths as plain values, and numbers that are not finite as None."""
    return json.loads(to_json(value, inf_nan_mode="null"))


def require_at_least(arguments: Namespace, **least: float) -> None:
    """Raise ConfigError for an option that is NaN or less than its least value in `least`."""
    for name, bound in least.items():
        if not (value := getattr(arguments, name)) >= bound:
            raise ConfigError(f"--{name.replace('_', '-')}={value}: must be at least {bound}")


def print_plain(console: Console, text: str, **style: Any) -> None:
    """Print text that may contain names and paths: without markup, colours of numbers or line breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True, **style)


@contextmanager
def exit_status(if_interrupted: str, expected: tuple[type[Exception], ...] = (OPDError,)) -> Iterator[None]:
    """Turn an error in the block into the last line on stderr and an exit status; unexpected errors print a traceback.

    if_interrupted: message after Ctrl-C if the interrupt has no note.
    """
    quiet_libraries()
    keep_compiled_code_private()
    if logging.lastResort is not None:  # prints warnings, as no handler is set up
        logging.lastResort.setFormatter(VisibleFormatter())
    try:
        yield
    except expected as error:
        fail(str(error), 1, _notes(error))
    except KeyboardInterrupt as interrupt:
        notes = getattr(interrupt, "__notes__", [if_interrupted])
        fail(f"interrupted; {notes[-1]}", INTERRUPTED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_THE_DISK:
            fail(refusal(Path(str(error.filename or "a file of this run")), error.errno), 1)
        fail(f"{type(error).__name__}: {error}", 1, [traceback.format_exc()])


@contextmanager
def standard_streams() -> Iterator[None]:
    """Open all three streams, and replace characters that stdout and stderr cannot encode.

    Output to a closed pipe or a full disk is dropped without changing the exit status.
    """
    _open_closed_streams()
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    for stream in streams:
        stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        for stream in streams:
            _discard_undelivered(stream)


def _open_closed_streams() -> None:
    """Open /dev/null for closed streams, also for child processes."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode)  # noqa: SIM115 — it takes the closed stream's number and stays open
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)


def _discard_undelivered(stream: io.TextIOWrapper) -> None:
    """Redirect a stream that cannot be written to /dev/null, as Python's flush at exit would fail again."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _notes(error: BaseException | None) -> Iterator[str]:
    """Yield the notes of an error and of its causes, such as a worker's traceback or a server's log."""
    while error is not None:
        yield from getattr(error, "__notes__", ())
        error = error.__cause__


def fail(message: str, status: int, notes: Iterable[str] = ()) -> NoReturn:
    """Print each line of an error and exit; with torchrun, only rank 0 prints."""
    if Processes.started().rank > 0:
        sys.exit(status)
    for note in notes:
        print(visible(without_secrets(note)), file=sys.stderr)
    for line in without_secrets(message).splitlines():  # a configuration's problems are one line each
        print(between_words(f"error: {visible(line)}"), file=sys.stderr)
    sys.exit(status)
