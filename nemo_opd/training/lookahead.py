"""Training batches on their way from the loader through the teachers to the student."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, Self

from nemo_opd.logging.metrics import Timer
from nemo_opd.training.models import Asked, Taught
from nemo_opd.types import Batch


class BatchSource(Protocol):
    """Training batches, endless and resumable; the loader of a corpus, for one. Used as a context manager."""

    @property
    def epoch(self) -> int:
        """Epoch, counted from 0, of the batch that was returned last."""
        ...

    @property
    def timed_as(self) -> str:
        """Name of the span that waiting for a batch is."""
        ...

    def start(self) -> None:
        """Begin to read ahead, where it does so."""

    def next(self) -> Batch: ...

    def state_dict(self) -> dict[str, int]:
        """Where it is, behind the batch that was returned last."""
        ...

    def load_state_dict(self, state: Mapping[str, int], /) -> None:
        """Go to where the state was taken. Raises CheckpointError when that was with other data."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class Teachers(Protocol):
    def ask(self, batch: Batch, about: str) -> Asked: ...

    def answer(self, asked: Asked) -> Taught: ...


@dataclass(frozen=True, slots=True)
class UnderWay:
    asked: Asked
    epoch: int
    place: dict[str, int]
    """State of the source behind this batch."""


class Lookahead:
    """Taught batches in the source's order; while the student trains on one, the teachers read the next `depth`.

    Everything that waits does so in the caller's thread, so errors and signals have one place to go. What the teachers
    were asked ahead is lost when a run ends early, and asked again when it continues.
    """

    def __init__(self, source: BatchSource, teachers: Teachers, *, depth: int, steps: range) -> None:
        """depth: 0 where student and teachers take turns. steps: whose batches are to be read; none is asked beyond."""
        self._source = source
        self._teachers = teachers
        self._depth = depth
        self._steps = iter(steps)
        self._under_way: deque[UnderWay] = deque()
        self._epoch = source.epoch
        self._place = source.state_dict()

    @property
    def epoch(self) -> int:
        """Epoch, counted from 0, of the batch that was returned last."""
        return self._epoch

    def state_dict(self) -> dict[str, int]:
        """The source's state as if nothing had been read beyond the batch that was returned last."""
        return self._place

    def next(self, timer: Timer) -> Taught:
        """The next batch, taught. Raises what reading it raises, or a teacher.

        Times what the source says, and what the teachers cost the caller: `teacher_s` where they take turns with the
        student, else `teacher_wait_s`.
        """
        self._ask(1, timer)
        first = self._under_way.popleft()
        with timer.span(self._wait):
            taught = self._teachers.answer(first.asked)
        self._epoch, self._place = first.epoch, first.place
        self._ask(self._depth, timer)
        return taught

    @property
    def _wait(self) -> str:
        return "teacher_wait_s" if self._depth else "teacher_s"

    def _ask(self, number: int, timer: Timer) -> None:
        """Have so many batches under way, where there are as many left."""
        for step in islice(self._steps, max(0, number - len(self._under_way))):
            with timer.span(self._source.timed_as):
                batch = self._source.next()
            with timer.span(self._wait):
                asked = self._teachers.ask(batch, f"step {step}")
            self._under_way.append(UnderWay(asked, self._source.epoch, self._source.state_dict()))
