"""The order of training data depends on seed and step alone, also after an interruption and with workers."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from nemo_opd.data.loader import TrainLoader, lost_workers, validation_batches
from nemo_opd.data.order import BatchOrder
from nemo_opd.data.samples import Sample, Tokens
from nemo_opd.errors import CheckpointError, DataError
from tests.waiting import wait_until

NUM_DOCUMENTS, BATCH_SIZE = 7, 3
STEPS_PER_EPOCH = 3


class FakeDocuments:
    """Document i is the text of the number i + 1."""

    def __init__(self, num_documents: int = NUM_DOCUMENTS) -> None:
        self.num_documents = num_documents

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, indices: list[int]) -> dict[str, list[str]]:
        return {"text": [str(i + 1) for i in indices]}


def number_sample(text: str) -> Sample:
    """Return a sample of n tokens with id n for the text of the number n."""
    number = int(text)
    return Sample(
        Tokens(
            np.full(number, number, np.int32),
            np.arange(number) > 0,
            np.ones(number, np.int32),
        ),
        (),
    )


def report_or_refuse(text: str) -> Sample:
    """Return as ids: number, process, threads, whether SIGINT is blocked, whether tokenizers are serial. Fails at 4."""
    if text == "4":
        raise DataError(f"document {text} is bad")
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    serial = os.environ.get("TOKENIZERS_PARALLELISM") == "false"
    ids = np.array([int(text), os.getpid(), torch.get_num_threads(), blocked, serial], np.int32)
    return Sample(Tokens(ids, ids > 0, ids), ())


def opened(
    make: Callable[[str], Sample],
    num_workers: int,
    num_documents: int = NUM_DOCUMENTS,
    batch_size: int = 1,
    seed: int = 0,
    shuffle: bool = False,
) -> TrainLoader[Sample]:
    order = BatchOrder(num_documents, batch_size, seed, shuffle)
    return TrainLoader(FakeDocuments(num_documents), make, order, num_workers)


def train_loader(
    num_workers: int = 0,
    seed: int = 5,
    shuffle: bool = True,
    batch_size: int = BATCH_SIZE,
    num_documents: int = NUM_DOCUMENTS,
) -> TrainLoader[Sample]:
    return opened(number_sample, num_workers, num_documents, batch_size, seed, shuffle)


def numbers(loader: TrainLoader, steps: int) -> list[list[int]]:
    return [loader.next().student.lengths.tolist() for _ in range(steps)]


@pytest.fixture(scope="module")
def uninterrupted() -> list[list[int]]:
    """Return three epochs, read without workers."""
    return numbers(train_loader(), 3 * STEPS_PER_EPOCH)


def children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid}


def epochs(batches: list[list[int]]) -> Iterator[list[list[int]]]:
    for start in range(0, len(batches), STEPS_PER_EPOCH):
        yield batches[start : start + STEPS_PER_EPOCH]


def test_every_epoch_has_every_document_once_and_keeps_its_short_batch(uninterrupted: list[list[int]]) -> None:
    for epoch in epochs(uninterrupted):
        assert [len(batch) for batch in epoch] == [3, 3, 1]
        assert sorted(number for batch in epoch for number in batch) == list(range(1, NUM_DOCUMENTS + 1))
    first, second, third = epochs(uninterrupted)
    assert first != second != third


def test_order_without_shuffling_and_of_another_seed(uninterrupted: list[list[int]]) -> None:
    assert numbers(train_loader(shuffle=False), 4) == [[1, 2, 3], [4, 5, 6], [7], [1, 2, 3]]
    assert numbers(train_loader(seed=6), 9) != uninterrupted


def test_order_is_independent_of_global_random_state(uninterrupted: list[list[int]]) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert numbers(train_loader(), 9) == uninterrupted
    assert torch.equal(state, torch.get_rng_state())


def test_resume_at_every_step(uninterrupted: list[list[int]]) -> None:
    """Catches a wrong resume at step 0 and around the end of an epoch."""
    first = train_loader()
    for step in range(len(uninterrupted)):
        resumed = train_loader()
        resumed.load_state_dict(first.state_dict())
        assert resumed.epoch == first.epoch
        assert numbers(resumed, len(uninterrupted) - step) == uninterrupted[step:]
        first.next()


def test_rewind(uninterrupted: list[list[int]]) -> None:
    loader = train_loader()
    start = loader.state_dict()
    numbers(loader, 4)
    loader.load_state_dict(start)
    assert numbers(loader, 2) == uninterrupted[:2]


@pytest.mark.world
def test_a_worker_resumes_across_the_end_of_an_epoch(uninterrupted: list[list[int]]) -> None:
    """Bug: the state counts batches that a worker has read ahead, so that a resumed run skips them.

    Also resumes without a worker from a state with one, and the reverse.
    """
    start = train_loader()
    numbers(start, 1)
    with closing(train_loader(num_workers=1)) as loader:
        loader.load_state_dict(start.state_dict())
        for step in range(1, len(uninterrupted) - 1):
            assert numbers(loader, 1) == [uninterrupted[step]]
            resumed = train_loader()
            resumed.load_state_dict(loader.state_dict())
            assert numbers(resumed, 1) == [uninterrupted[step + 1]]
        assert numbers(loader, 1) == [uninterrupted[-1]]
        assert len(children()) == 1
    assert not children()


@pytest.mark.world
def test_workers_are_spawned_serial_deaf_to_interrupts_and_leave_nothing_behind() -> None:
    """Bug: a worker dies of a signal to the process group, and loses the batch that it reads.

    Checks several properties in one run, as a worker takes seconds to start.
    """

    def read() -> None:
        with opened(report_or_refuse, 1) as loader:
            loader.start()
            (pid,) = children()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
            assert loader.next().student.ids[0].tolist() == [1, pid, 1, True, True]
            assert os.getpgid(pid) == pid
            os.kill(pid, signal.SIGINT)
            assert loader.next().student.ids[0, :2].tolist() == [2, pid]
            # Loading the loader's state discards batches that were read ahead.
            loader.load_state_dict(loader.state_dict())
            assert not children()
            number, another_pid = loader.next().student.ids[0, :2].tolist()
            assert number == 3
            assert children() == {another_pid} != {pid}
            loader.next()

    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(DataError, match="document 4 is bad"):
        read()
    assert not children()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.world
def test_a_worker_that_is_killed_is_one_line() -> None:
    """Bug: a traceback from an arbitrary place of the driver."""

    def lose() -> None:
        with lost_workers(), opened(report_or_refuse, 1) as loader:
            loader.start()
            (pid,) = children()
            os.kill(pid, signal.SIGKILL)
            while True:
                loader.next()

    with pytest.raises(DataError, match=r"^DataLoader worker \(pid.*; check whether the machine's memory is full"):
        lose()
    wait_until(lambda: not children(), "its end", every_s=0.01)


@pytest.mark.world
def test_a_worker_that_still_starts_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the worker's traceback behind the last line of a run that ended early."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.0)
    with opened(report_or_refuse, 1) as loader:
        loader.start()
    assert not children()


class Slowly:
    """A slow sample maker whose class records the texts of all its copies."""

    seconds: ClassVar[float]
    texts: ClassVar[list[str]] = []
    makers: ClassVar[set[int]] = set()

    def __call__(self, text: str) -> Sample:
        time.sleep(self.seconds)
        self.texts.append(text)
        self.makers.add(id(self))
        return number_sample(text)


@pytest.fixture
def slowly() -> Slowly:
    Slowly.seconds = 0.02
    Slowly.texts.clear()
    Slowly.makers.clear()
    return Slowly()


def test_without_workers_too_the_next_batch_is_made_while_the_last_one_is_used(slowly: Slowly) -> None:
    """Bug: the run tokenizes and aligns between two steps."""
    with opened(slowly, 0, 60, BATCH_SIZE, 5, True) as loader:
        loader.start()
        for step in range(1, 7):
            wait_until(lambda number=step * BATCH_SIZE: len(slowly.texts) == number, "next batch", every_s=0.002)
            loader.next()
    assert id(slowly) not in slowly.makers, "a tokenizer of its own: the caller uses this one meanwhile"


def test_closing_waits_for_one_sample_and_not_for_a_batch(slowly: Slowly) -> None:
    batch_size = 1000
    loader = opened(slowly, 0, batch_size, batch_size, 5, True)
    loader.start()
    wait_until(lambda: bool(slowly.texts), "first sample", every_s=0.002)
    loader.close()
    num_made = len(slowly.texts)
    assert num_made < batch_size
    assert "data" not in {thread.name.split("_")[0] for thread in threading.enumerate()}
    assert len(slowly.texts) == num_made
    Slowly.seconds = 0.0
    with loader:
        assert len(loader.next()) == batch_size, "reading on begins where it was"


def test_an_error_ahead_is_raised_with_its_own_batch() -> None:
    with opened(report_or_refuse, 0) as loader:
        assert [int(loader.next().student.ids[0, 0]) for _ in range(3)] == [1, 2, 3]
        with pytest.raises(DataError, match="document 4 is bad"):
            loader.next()


def test_epoch_is_that_of_the_last_batch() -> None:
    loader = train_loader()
    assert loader.epoch == 0
    seen = []
    for _ in range(2 * STEPS_PER_EPOCH + 1):
        loader.next()
        seen.append(loader.epoch)
    assert seen == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("changed", [{"num_documents": 8}, {"batch_size": 2}, {"seed": 6}, {"shuffle": False}])
def test_a_state_of_another_order_is_refused(changed: dict[str, Any]) -> None:
    (name,) = changed
    with pytest.raises(CheckpointError, match=f"{name}=.*this run has {name}={int(changed[name])}"):
        train_loader(**changed).load_state_dict(train_loader().state_dict())


def test_batch_larger_than_the_data() -> None:
    assert [len(batch) for batch in numbers(train_loader(batch_size=100), 2)] == [7, 7]


def test_the_order_is_reached_without_reading_earlier_batches() -> None:
    order = BatchOrder(num_documents=10, batch_size=4, seed=0, shuffle=True)
    assert list(islice(order.starting_at(3 * 10**6), 3)) == list(islice(order.starting_at(3 * 10**6), 3))
    assert sorted(i for batch in islice(order.starting_at(3 * 10**6), 3) for i in batch) == list(range(10))


def test_validation_is_every_document_once_in_order() -> None:
    batches = list(validation_batches(FakeDocuments(), number_sample, 3))
    assert [batch.student.lengths.tolist() for batch in batches] == [[1, 2, 3], [4, 5, 6], [7]]
