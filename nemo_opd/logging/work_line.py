"""Work under way as one line."""

from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from nemo_opd.logging.formats import amount, clock, figure
from nemo_opd.progress import Work, current

SHOWN_AFTER_S = 1.0
"""In a live display: shorter work would only flicker."""


def work_line(work: Work) -> str:
    """Such as `validating  12/40 batches  1.520/s  0:08  left 0:18`; what is not known is left out."""
    done, elapsed_s = work.look(), work.elapsed_s
    parts = [work.name]
    if work.total is not None or done:
        whole = "" if work.total is None else f"/{amount(work.total)}"
        parts.append(f"{amount(done)}{whole} {work.unit}".rstrip())
    if done and elapsed_s:
        rate = done / elapsed_s
        parts.append(f"{figure(rate) if rate < 100 else amount(rate)}/s")
    parts.append(clock(elapsed_s))
    if work.total is not None and done:
        parts.append(f"left {clock(max(0.0, elapsed_s * (work.total - done) / done))}")
    return "  ".join(parts)


class WorkLine:
    """The work under way at the moment of drawing, cut to the width; nothing where there is none."""

    def __init__(self, otherwise: Callable[[], Work | None] = lambda: None) -> None:
        """otherwise: what to show where nothing is announced."""
        self._otherwise = otherwise

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        work = current() or self._otherwise()
        if work is not None and work.elapsed_s >= SHOWN_AFTER_S:
            yield Text(f"  {work_line(work)}", "dim", no_wrap=True, overflow="ellipsis")
