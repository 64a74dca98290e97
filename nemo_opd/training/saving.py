"""Writing of a run's checkpoints, synchronously or in the background."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nemo_opd.checkpoint.manager import CheckpointManager, Progress
from nemo_opd.checkpoint.verify import require_whole
from nemo_opd.files import size_below
from nemo_opd.progress import working
from nemo_opd.training.models import Models


class _GivenUpError(Exception):
    """Abandonment of an incomplete checkpoint; its context removes the files."""


@dataclass(frozen=True)
class _UnfinishedCheckpoint:
    """Checkpoint that is being written."""

    step: int
    models: Models
    folder: Path
    start: float
    """Value of `time.monotonic`."""
    stack: ExitStack
    """Completes the checkpoint if closed without an error."""


class Saving:
    """Writer of a run's checkpoints, one at a time. One that is incomplete when the run ends is removed."""

    def __init__(
        self, checkpoints: CheckpointManager, num_bytes: int, num_ranks: int, on_saved: Callable[[int, float], None]
    ) -> None:
        """num_bytes: estimated size of a checkpoint. num_ranks: ranks of the student.

        on_saved: called with step and seconds when a checkpoint is complete.
        """
        self._checkpoints = checkpoints
        self._num_bytes = num_bytes
        self._num_ranks = num_ranks
        self._on_saved = on_saved
        self._current: _UnfinishedCheckpoint | None = None

    def save(self, models: Models, progress: Progress) -> None:
        """Write a checkpoint. Raises CheckpointError if the disk does not take it."""
        self._begin(models, progress, models.save)
        self.end()

    def begin(self, models: Models, progress: Progress) -> None:
        """Wait for the previous checkpoint, then start writing one in the background; `end` completes it."""
        self._begin(models, progress, models.begin_save)

    def _begin(self, models: Models, progress: Progress, write: Callable[[Path], None]) -> None:
        self.end()
        start = time.monotonic()
        with ExitStack() as stack:
            folder = stack.enter_context(self._checkpoints.writing(progress, self._num_bytes))
            with self._working(progress.step, folder):
                write(folder)
            self._current = _UnfinishedCheckpoint(progress.step, models, folder, start, stack.pop_all())

    def end_if_written(self) -> None:
        """Complete the current checkpoint if all of its files are written."""
        if self._current is not None and self._current.models.is_saved():
            self.end()

    def end(self) -> None:
        """Wait for the current checkpoint, if any, and complete it. Raises the errors of writing."""
        if self._current is None:
            return
        current, self._current = self._current, None
        with current.stack:
            with self._working(current.step, current.folder):
                current.models.end_save()
            # Check before it becomes the newest checkpoint and older ones are removed.
            require_whole(current.folder, self._num_ranks)
        self._on_saved(current.step, time.monotonic() - current.start)

    def _working(self, step: int, folder: Path) -> AbstractContextManager[object]:
        name = f"writing the checkpoint of step {step}"
        return working(name, self._num_bytes, "B", measure=lambda: size_below(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the incomplete checkpoint of a failed run. No worker may be writing any more."""
        if self._current is not None:
            with suppress(_GivenUpError), self._current.stack:
                raise _GivenUpError
