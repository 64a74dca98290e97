"""Prefetching of training batches through the teachers."""

from collections import deque
from dataclasses import dataclass
from itertools import islice

from nemo_opd.data.loader import TrainLoader
from nemo_opd.logging.metrics import Timer
from nemo_opd.training.models import InFlightBatch, Models, ScoredBatch
from nemo_opd.training.rollout_source import RolloutSource

BatchSource = TrainLoader | RolloutSource
"""Endless, resumable source of training batches; a context manager."""


@dataclass(frozen=True, slots=True)
class _Queued:
    """A batch in flight and the source's state after it."""

    batch: InFlightBatch
    epoch: int
    state: dict[str, int]


class Lookahead:
    """Scored batches in source order; while the student trains on one, the teachers read the next `depth`.

    All waiting happens in the caller's thread, which gets all errors and signals. Batches in flight are dropped when a
    run ends early, and reread when it resumes.
    """

    def __init__(self, source: BatchSource, teachers: Models, *, depth: int, steps: range) -> None:
        """Store the arguments. depth: 0 if student and teachers take turns. steps: step numbers to read batches for."""
        self._source = source
        self._teachers = teachers
        self._depth = depth
        self._steps = iter(steps)
        self._queue: deque[_Queued] = deque()
        self._epoch = source.epoch
        self._state = source.state_dict()

    @property
    def epoch(self) -> int:
        """Epoch, counted from 0, of the last returned batch."""
        return self._epoch

    def state_dict(self) -> dict[str, int]:
        """Return the source's state after the last returned batch."""
        return self._state

    def next(self, timer: Timer) -> ScoredBatch:
        """Return the next scored batch. Raises errors of the source and the teachers.

        Times the source under its own name, and the teachers as `teacher_s` if they take turns with the student,
        otherwise as `teacher_wait_s`.
        """
        self._fill(1, timer)
        first = self._queue.popleft()
        with timer.span(self._wait):
            scored = self._teachers.collect(first.batch)
        self._epoch, self._state = first.epoch, first.state
        self._fill(self._depth, timer)
        return scored

    @property
    def _wait(self) -> str:
        return "teacher_wait_s" if self._depth else "teacher_s"

    def _fill(self, number: int, timer: Timer) -> None:
        """Submit batches until `number` are in flight or the steps run out."""
        for step in islice(self._steps, max(0, number - len(self._queue))):
            with timer.span(self._source.timed_as):
                batch = self._source.next()
            with timer.span(self._wait):
                in_flight = self._teachers.submit(batch, f"step {step}")
            self._queue.append(_Queued(in_flight, self._source.epoch, self._source.state_dict()))
