"""Batches arrive in order with their teachers' output, and nobody waits for the batches ahead."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

import pytest

from nemo_opd.data.loader import TrainLoader
from nemo_opd.errors import DataError, WorkerError
from nemo_opd.logging.metrics import Timer
from nemo_opd.training.batches import Lookahead

PER_EPOCH = 4


class Numbers:
    """A loader whose n-th batch is n, counted from 1."""

    timed_as = "data_wait_s"

    def __init__(self, bad: int | None = None) -> None:
        self.returned = 0
        self.bad = bad

    @property
    def epoch(self) -> int:
        return max(0, self.returned - 1) // PER_EPOCH

    def state_dict(self) -> dict[str, int]:
        return {"num_batches": self.returned}

    def next(self) -> int:
        if self.returned + 1 == self.bad:
            raise DataError(f"document {self.bad} is bad")
        self.returned += 1
        return self.returned


@dataclass
class FakeTeachers:
    """Teachers that read one batch after another in a thread, each in `seconds`."""

    seconds: float = 0.0
    bad: int | None = None
    submitted: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    process: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def submit(self, batch: int, about: str) -> Future[int]:
        assert about == f"step {batch}"
        self.submitted.append(batch)
        return self.process.submit(self._read, batch)

    def _read(self, batch: int) -> int:
        time.sleep(self.seconds)
        if batch == self.bad:
            raise WorkerError("teacher", 0, "it has left the room", "")
        return batch

    def collect(self, future: Future[int]) -> int:
        self.answered.append(future.result())
        return self.answered[-1]


def lookahead(teachers: FakeTeachers, depth: int, last: int = 10, *, loader: Numbers | None = None) -> Lookahead:
    loader = loader or Numbers()
    return Lookahead(cast(TrainLoader, loader), teachers, depth=depth, steps=range(loader.returned + 1, last + 1))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_come_in_order_and_so_far_ahead(depth: int) -> None:
    """Bug: fewer or more than `depth` batches ahead of the student's are submitted, or one after the last."""
    teachers = FakeTeachers()
    batches = lookahead(teachers, depth)
    for n in range(1, 11):
        assert batches.next(Timer()) == n
        assert teachers.submitted == list(range(1, min(n + depth, 10) + 1))
        assert teachers.answered == list(range(1, n + 1)), "nobody waits for what is ahead"


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_place_and_epoch_are_those_of_the_batch_that_was_returned(depth: int) -> None:
    """Bug: a checkpoint skips batches that the teachers have read but the student has not."""
    batches = lookahead(FakeTeachers(), depth)
    assert batches.state_dict() == {"num_batches": 0}
    for n in range(1, 11):
        batches.next(Timer())
        assert batches.state_dict() == {"num_batches": n}
        assert batches.epoch == (n - 1) // PER_EPOCH


def test_a_resumed_run_begins_at_its_place() -> None:
    loader = Numbers()
    loader.returned = 6
    batches = lookahead(FakeTeachers(), 1, 8, loader=loader)
    assert (batches.epoch, batches.state_dict()) == (1, {"num_batches": 6})
    assert [batches.next(Timer()) for _ in range(2)] == [7, 8]
    assert loader.returned == 8


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_teacher_that_fails_ahead_fails_with_its_own_batch(depth: int) -> None:
    """Bug: the batches before the failing one are lost."""
    batches = lookahead(FakeTeachers(bad=3), depth)
    assert [batches.next(Timer()) for _ in range(2)] == [1, 2]
    with pytest.raises(WorkerError, match="left the room"):
        batches.next(Timer())


@pytest.mark.parametrize(("depth", "span"), [(0, "teacher_s"), (1, "teacher_wait_s")])
def test_the_wait_for_teachers_has_its_own_span(depth: int, span: str) -> None:
    """Bug: the wait for teachers that work ahead is timed as teacher_s, which is their full time in turns."""
    timer, teachers = Timer(), FakeTeachers(seconds=0.05)
    lookahead(teachers, depth).next(timer)
    times = timer.take()
    assert {name for name in times if name.startswith("teacher")} == {span}
    assert times[span] >= teachers.seconds


def test_data_that_cannot_be_read_ends_the_run_at_once() -> None:
    batches = lookahead(FakeTeachers(), 1, loader=Numbers(bad=3))
    batches.next(Timer())
    with pytest.raises(DataError, match="document 3"):
        batches.next(Timer())
