"""A command: from its configuration to its exit status."""

import gc
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from nemo_opd.cluster.placement import Processes
from nemo_opd.config.load import S, run_settings_with_hydra
from nemo_opd.config.run import RunConfig
from nemo_opd.config.secrets import without_secrets
from nemo_opd.disk import OF_THE_DISK, refusal
from nemo_opd.errors import OPDError
from nemo_opd.logging.busy import busy
from nemo_opd.paths import keep_compiled_code_private
from nemo_opd.progress import quiet_libraries
from nemo_opd.training.interrupt import interruptible, was_requested

_INTERRUPTED = 130
"""Exit status, by shell convention, of a run that was interrupted before it could save."""


def main(task: Callable[[RunConfig], None], *, config_dir: Path, config_name: str) -> None:
    """Run `task` with the command line's configuration. An error is one clear last line and exit status 1."""
    main_with(task, RunConfig, config_dir=config_dir, config_name=config_name)


def main_with(task: Callable[[S], None], model: type[S], *, config_dir: Path, config_name: str) -> None:
    """Run `task` as `main` does, for a command with its own settings."""
    quiet_libraries()
    keep_compiled_code_private()
    with standard_streams(), interruptible():
        try:
            run_settings_with_hydra(
                task,
                model,
                config_dir=config_dir,
                config_name=config_name,
                after_sweep=report_sweep,
                is_interrupted=was_requested,
            )
        except OPDError as error:
            fail(str(error), 1, _notes(error))
        except KeyboardInterrupt as interrupt:
            kept = getattr(interrupt, "__notes__", ["nothing was saved since it started"])
            fail(f"interrupted; {kept[-1]}", _INTERRUPTED)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in OF_THE_DISK:
                fail(refusal(Path(str(error.filename or "a file of this run")), error.errno), 1)
            fail(f"{type(error).__name__}: {error}", 1, [traceback.format_exc()])


@contextmanager
def standard_streams() -> Iterator[None]:
    """Open all three streams, and replace characters that stdout and stderr cannot encode.

    Output to a closed pipe or a full disk is lost without changing the exit status.
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
    """Open /dev/null for streams that the caller has closed, also in processes that are started later."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode)  # noqa: SIM115 — it takes the closed stream's number and stays open
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)


def _discard_undelivered(stream: io.TextIOWrapper) -> None:
    """Redirect a stream that cannot be written to /dev/null; Python's flush at exit would fail again."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def print_line(text: str) -> None:
    """Print a line, if stdout can be written."""
    with suppress(OSError):
        print(text, flush=True)


def report_sweep(root: Path, names: Sequence[str]) -> None:
    """Print a table of a sweep's runs and write `root`/report.html, if any run has written something."""
    # matplotlib is slow to import, and few commands are sweeps
    from nemo_opd.logging.sweep import read_sweep, sweep_table, write_sweep_report

    runs = read_sweep(root, names)
    if not any(run.has_started for run in runs):
        return
    with suppress(OSError):
        Console().print(sweep_table(runs))
    print_line(f"report  {write_sweep_report(root, runs)}")


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Show a busy line while libraries are imported inside, with the garbage collector paused.

    Modules live as long as the process, and the collector would scan them again and again: the pause saves about an
    eighth of the time. Afterwards these objects are excluded from collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with busy(f"loading {what}"):
            yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _notes(error: BaseException | None) -> Iterator[str]:
    """Yield the notes of an error and of its causes, such as a worker's traceback or a server's log."""
    while error is not None:
        yield from getattr(error, "__notes__", ())
        error = error.__cause__


def fail(message: str, status: int, notes: Iterable[str] = ()) -> NoReturn:
    """Print each line of an error and exit; with torchrun, rank 0 alone prints it."""
    if Processes.started().rank > 0:
        sys.exit(status)
    for note in notes:
        print(without_secrets(note), file=sys.stderr)
    for line in without_secrets(message).splitlines():  # several problems of a configuration have a line each
        print(f"error: {line}", file=sys.stderr)
    sys.exit(status)
