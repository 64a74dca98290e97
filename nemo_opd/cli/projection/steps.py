"""Progress of the passes, and writing of the projection file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_Counter = Callable[[int, int], None]
"""Called with (done, total)."""


class Steps:
    """A progress line for each step, with a bar if the step counts."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, name: str) -> _Counter:
        """End the previous step and begin one."""
        self.end()
        self._task = task = self._progress.add_task(name, total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)

    def end(self) -> None:
        if self._task is not None and self._progress.tasks[self._task].total is None:
            self._progress.update(self._task, completed=1, total=1)


@contextmanager
def steps(console: Console) -> Iterator[Steps]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        display = Steps(progress)
        yield display
        display.end()


def write(matrix: ProjectionMatrix, path: Path, console: Console) -> None:
    """Write the file, complete or not at all, and print a line about it."""
    matrix.save(path)
    rows = int((matrix.row_lengths > 0).sum())
    size = path.stat().st_size / 1e6
    console.print(
        f"wrote {path}: {rows:,} of {matrix.student_vocab_size:,} rows, {int(matrix.exact.sum()):,} exact, up to "
        f"{matrix.row_lengths.max(initial=0)} teacher tokens each ({size:.1f} MB)",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
