"""A command: configuration in, exit status out."""

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

INTERRUPTED = 130
"""Exit status by shell convention; of a run that was interrupted before it could save."""


def main(task: Callable[[RunConfig], None], *, config_dir: Path, config_name: str) -> None:
    """Run `task` with the command line's configuration. An error is one clear last line and exit status 1."""
    main_with(task, RunConfig, config_dir=config_dir, config_name=config_name)


def main_with(task: Callable[[S], None], model: type[S], *, config_dir: Path, config_name: str) -> None:
    """As `main`, for a command with settings of its own."""
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
            fail(str(error), 1, notes(error))
        except KeyboardInterrupt as interrupt:
            kept = getattr(interrupt, "__notes__", ["nothing was saved since it started"])
            fail(f"interrupted; {kept[-1]}", INTERRUPTED)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in OF_THE_DISK:
                fail(refusal(Path(str(error.filename or "a file of this run")), error.errno), 1)
            fail(f"{type(error).__name__}: {error}", 1, [traceback.format_exc()])


@contextmanager
def standard_streams() -> Iterator[None]:
    """Inside, all three are there, and characters that stdout and stderr cannot encode are replaced.

    Text that cannot be delivered, to a closed pipe or a full disk, does not change the exit status.
    """
    open_closed_streams()
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    for stream in streams:
        stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        for stream in streams:
            discard_undelivered(stream)


def open_closed_streams() -> None:
    """Let what the caller has closed lead to /dev/null, also for processes that are started later."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode)  # noqa: SIM115 — it takes the number of the closed stream, and stays
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)


def discard_undelivered(stream: io.TextIOWrapper) -> None:
    """Send what the stream cannot write to /dev/null, where Python's own flush at exit would fail again."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def say(text: str) -> None:
    """Print a line for a person, if anyone can read it."""
    with suppress(OSError):
        print(text, flush=True)


def report_sweep(root: Path, names: Sequence[str]) -> None:
    """Compare the runs of a sweep, in a table here and in `root`/report.html, where any has written something."""
    # matplotlib takes a while, and few commands are sweeps
    from nemo_opd.logging.sweep import read_sweep, sweep_table, write_sweep_report

    runs = read_sweep(root, names)
    if not any(run.has_started for run in runs):
        return
    with suppress(OSError):
        Console().print(sweep_table(runs))
    say(f"report  {write_sweep_report(root, runs)}")


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Shows that libraries are imported inside, with the garbage collector paused.

    What modules define stays as long as the process, and the collector would walk all of it again and again: pausing it
    saves about an eighth of the time. Afterwards it leaves these objects alone.
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


def notes(error: BaseException | None) -> Iterator[str]:
    """Of an error and of those that led to it: a worker's traceback, the log of a server."""
    while error is not None:
        yield from getattr(error, "__notes__", ())
        error = error.__cause__


def fail(message: str, status: int, notes: Iterable[str] = ()) -> NoReturn:
    """Print each line of an error and exit; of torchrun's processes rank 0 alone prints what all have found."""
    if Processes.started().rank > 0:
        sys.exit(status)
    for note in notes:
        print(without_secrets(note), file=sys.stderr)
    for line in without_secrets(message).splitlines():  # several problems of a configuration have a line each
        print(f"error: {line}", file=sys.stderr)
    sys.exit(status)
