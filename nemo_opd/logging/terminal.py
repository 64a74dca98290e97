"""Texts and current work on a terminal.

Control characters in texts of models, servers and files are shown, not obeyed. Current work is shown on a progress
line, or in occasional lines of an otherwise silent process.
"""

import gc
import json
import logging
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from nemo_opd.logging.interface import amount, clock, figure
from nemo_opd.progress import Work, current, working
from nemo_opd.types import Closing

EARLY = 0.9
"""Share of an interval after which it counts as over: a busy machine wakes threads late."""
SILENCE_S = 60.0
"""Seconds without output after which a line names the current work."""
_SHOWN_AFTER_S = 1.0
"""Shortest work that a live display shows; shorter work would only flicker."""
_PICTURES = 0x2400
"""Unicode's picture of the control character 0; the pictures of the next 31 follow."""
_SHOWN: dict[int, int | str] = {code: _PICTURES + code for code in range(0x20) if chr(code) not in "\n\t"}
_SHOWN |= {0x7F: 0x2421, **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}}
_SHOWN |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}  # reorder a line

_is_quiet = False


def visible(text: str) -> str:
    """Replace control characters, other than line feeds and tabs, by pictures such as ␛ or escapes such as \\u202e."""
    return text.translate(_SHOWN)


def visible_json(value: object) -> str:
    """Format a value as a line of JSON with its control characters escaped, and other characters as they are."""
    return json.dumps(value, ensure_ascii=False).translate({code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)})


class VisibleConsole(Console):
    """A console that shows the control characters in texts; rich itself drops a few of them and prints the escapes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


class VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


@contextmanager
def without_progress() -> Iterator[None]:
    """Show no current work on stderr during the block."""
    global _is_quiet
    _is_quiet = True
    try:
        yield
    finally:
        _is_quiet = False


@contextmanager
def busy(what: str) -> Iterator[Work]:
    """Show the work in the block: live in a terminal, elsewhere by a line, and one more after each `SILENCE_S`.

    The live display goes to stderr and the lines to stdout, so both appear if a command's stdout is redirected. Yields
    the work, to which the block may add counts.
    """
    with ExitStack() as stack:
        terminal = VisibleConsole(stderr=True)
        if terminal.is_terminal and not _is_quiet:
            stack.enter_context(terminal.status(WorkLine()))
        if not sys.stdout.isatty():
            print_line(what)
            stack.enter_context(Ticker(_print_current, SILENCE_S))
        yield stack.enter_context(working(what))


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Show a busy line while libraries are imported in the block, with the garbage collector paused.

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


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line to stdout or another stream, if it can be written."""
    with suppress(OSError):
        print(visible(text), file=stream, flush=True)


def print_warning(text: str) -> None:
    """Print a warning to stderr, in colour and broken between words if it is a terminal, otherwise as a single line."""
    with suppress(OSError):
        VisibleConsole(stderr=True).print(Text(between_words(f"warning: {text}"), "yellow"), soft_wrap=True)


def between_words(text: str) -> str:
    """Break a line for stderr between words if it is a terminal, which would break it inside of keys and paths."""
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)


def _print_current() -> None:
    if (work := current()) is not None:
        print(visible(work_line(work)), flush=True)


def work_line(work: Work) -> str:
    """Return a line such as `validating  12/40 batches  1.520/s  0:08  left 0:18`, without unknown parts."""
    done, elapsed_s = work.look(), work.elapsed_s
    parts = [work.name]
    if work.total is not None or done:
        total = "" if work.total is None else f"/{amount(work.total)}"
        parts.append(f"{amount(done)}{total} {work.unit}".rstrip())
    if done and elapsed_s:
        rate = done / elapsed_s
        parts.append(f"{figure(rate) if rate < 100 else amount(rate)}/s")
    parts.append(clock(elapsed_s))
    if work.total is not None and done:
        parts.append(f"left {clock(max(0.0, elapsed_s * (work.total - done) / done))}")
    return "  ".join(parts)


class WorkLine:
    """The current work at the time of drawing, cut to the width; empty while idle."""

    def __init__(self, around: Callable[[], Work | None] = lambda: None) -> None:
        """Store `around`, which returns the enclosing work; it is shown alone if no work is announced."""
        self._around = around

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        work, around = current(), self._around()
        innermost = work or around
        if innermost is None or innermost.elapsed_s < _SHOWN_AFTER_S:
            return
        line = work_line(innermost)
        # no `validating the student and its teachers` in front of `validating the student`
        if work is not None and around is not None and work.name.split()[0] != around.name.split()[0]:
            line = f"{around.name}: {line}"
        yield Text(f"  {line}", "dim", no_wrap=True, overflow="ellipsis")


class Ticker(Closing):
    """A thread that calls `show` before each `interval_s` of silence is over, until it is closed.

    It stops if the output is closed; the next `touch` raises the error.
    """

    def __init__(self, show: Callable[[], None], interval_s: float) -> None:
        self._show, self._interval_s = show, EARLY * interval_s
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self.touch()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Restart the interval after other output. Raises the error of `show`, if it failed."""
        if self._failure is not None:
            raise self._failure
        self._due = time.monotonic() + self._interval_s

    def _run(self) -> None:
        while not self._closed.wait(max(0.0, self._due - time.monotonic())):
            if time.monotonic() < self._due:
                continue
            self.touch()
            try:
                self._show()
            # rich raises SystemExit on a closed pipe
            except (OSError, ValueError, SystemExit) as error:
                self._failure = error
                return

    def close(self) -> None:
        """Stop the thread and wait until it has finished printing."""
        self._closed.set()
        self._thread.join()
