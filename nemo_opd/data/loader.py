"""Batches for training, endless and resumable, and for validation, once and in order."""

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import resource_tracker
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch.utils.data import DataLoader

from nemo_opd.data.collate import collate, numbered
from nemo_opd.data.documents import Columns, Document, read_documents
from nemo_opd.data.domains import Domains, in_domains
from nemo_opd.data.mapped import MappedFiles
from nemo_opd.data.order import Drawn, State
from nemo_opd.data.samples import Sample
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.types import Batch

_Made = TypeVar("_Made")
_AT_A_TIME = 16
"""Documents read at a time where all are."""
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class SampleSource(Generic[_Made]):
    """Samples or windows of documents, by lists of their indices. Picklable: a copy is in every worker."""

    columns: Columns
    make: Callable[[Document], _Made]
    """A SampleMaker or a WindowMaker."""
    files: MappedFiles

    @classmethod
    def of(cls, columns: Columns, make: Callable[[Document], _Made]) -> Self:
        return cls(columns, make, MappedFiles.of(columns))

    def __getitems__(self, indices: list[int]) -> list[_Made]:
        return list(self.each(indices))

    def each(self, indices: list[int]) -> Iterator[_Made]:
        """Yield what is made of each document. Raises DataError, with the row, for one that cannot be read or used."""
        self.files.check(indices)
        for index, document in zip(indices, read_documents(self.columns, indices), strict=True):
            try:
                made = self.make(document)
            except (AlignmentError, DataError) as error:
                raise DataError(f"row {index} (counted from 0 over all files) cannot be used: {error}") from error
            yield made


@contextmanager
def lost_workers() -> Iterator[None]:
    """Raise DataError for a data worker that is killed inside: torch raises its own error wherever this process is."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(
            f"{str(error).strip().rstrip('.')}; see whether the machine's memory is full, or lower data.num_workers; "
            "run.resume=auto continues from the last checkpoint"
        ) from error


class Order(Protocol[_Made]):
    """The order of batches: a BatchOrder or a PackedOrder."""

    @property
    def start(self) -> State: ...

    def require_same(self, state: State) -> None: ...

    def epoch_at(self, state: State) -> int: ...

    def reads(self, state: State) -> Iterator[list[int]]: ...

    def draws(self, state: State, made: Iterator[list[_Made]]) -> Iterator[Drawn]: ...


class TrainLoader(Generic[_Made]):
    """Training batches in their order, made ahead while the caller does other things.

    That is done by `num_workers` spawned processes, or by a thread where there are none. The order depends neither on
    the number of workers nor on how batches are sharded. Close it, or use it as a context manager.
    """

    timed_as = "data_wait_s"

    def __init__(
        self, documents: Columns, make: Callable[[Document], _Made], order: Order[_Made], num_workers: int
    ) -> None:
        self._source = SampleSource.of(documents, make)
        self._order = order
        self._num_workers = num_workers
        self._state = order.start
        self._reader: _Thread[_Made] | _Workers[_Made] | None = None

    @property
    def epoch(self) -> int:
        """Epoch, counted from 0, of the batch that was returned last."""
        return self._order.epoch_at(self._state)

    def start(self) -> None:
        """Begin to read ahead; `next` does it too."""
        if self._reader is None:
            workers = self._num_workers
            arguments = (self._source, self._order, self._state)
            self._reader = _Workers(*arguments, workers) if workers else _Thread(*arguments)

    def next(self) -> Batch:
        """Return the next batch; the last of an epoch may be short. Raises errors of reading and aligning."""
        self.start()
        assert self._reader is not None
        batch, self._state = self._reader.next()
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the place in the run, and what it depends on."""
        return dict(self._state)

    def load_state_dict(self, state: State) -> None:
        """Go to the position at which the state was taken.

        Raises CheckpointError when that was with other data, batch size, seed, shuffling or packing.
        """
        self._order.require_same(state)
        self.close()
        self._state = dict(state)

    def close(self) -> None:
        """End what reads ahead. Reading on starts anew, at the next batch."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Thread(Generic[_Made]):
    """Makes a batch while the one before it is in use."""

    def __init__(self, source: SampleSource[_Made], order: Order[_Made], state: State) -> None:
        self._reading = _Reading(source)
        self._executor = ThreadPoolExecutor(1, "data")
        self._drawn = order.draws(state, map(self._reading, order.reads(state)))
        self._ahead = self._executor.submit(self._make)

    def next(self) -> tuple[Batch, State]:
        batch = self._ahead.result()
        self._ahead = self._executor.submit(self._make)
        return batch

    def close(self) -> None:
        """Wait for the document that is being read, and end the thread."""
        self._reading.is_closed = True
        self._executor.shutdown(cancel_futures=True)

    def _make(self) -> tuple[Batch, State]:
        drawn = next(self._drawn)
        return _collated(drawn), drawn.state


class _Reading(Generic[_Made]):
    """Reads documents in another thread until it is closed."""

    def __init__(self, source: SampleSource[_Made]) -> None:
        self._source = source
        self.is_closed = False

    @cached_property
    def _own(self) -> SampleSource[_Made]:
        """The source for that thread: tokenizers and database connections cannot be used by two at once."""
        return replace(self._source, make=pickle.loads(pickle.dumps(self._source.make)))

    def __call__(self, indices: list[int]) -> list[_Made]:
        """Return what is made of the documents. Raises CancelledError when it is closed."""
        made: list[_Made] = []
        for each in self._own.each(indices):
            if self.is_closed:
                raise CancelledError
            made.append(each)
        return made


class _Workers(Generic[_Made]):
    """Makes batches of what processes read ahead."""

    def __init__(self, source: SampleSource[_Made], order: Order[_Made], state: State, num_workers: int) -> None:
        self._reads = _WorkerReads(source, order.reads(state), num_workers)
        self._drawn = order.draws(state, self._reads)

    def next(self) -> tuple[Batch, State]:
        # Here and not in the workers: unpadded arrays go through a pipe, padded tensors would go through shared memory.
        drawn = next(self._drawn)
        return _collated(drawn), drawn.state

    def close(self) -> None:
        self._reads.close()


class _WorkerReads(Iterator[list[_Made]]):
    """PyTorch's data workers, two reads each ahead."""

    def __init__(self, source: SampleSource[_Made], reads: Iterator[list[int]], num_workers: int) -> None:
        loader: DataLoader[list[_Made]] = DataLoader(
            source,  # type: ignore[arg-type]
            batch_sampler=reads,
            num_workers=num_workers,
            collate_fn=_unchanged,
            worker_init_fn=_set_up_worker,
            # The loader draws a seed for its workers; not from the caller's global generator.
            generator=torch.Generator(),
            # A forked child would inherit locks held by threads of this process (Ray, pyarrow, tokenizers).
            multiprocessing_context="spawn",
        )
        with _children_apart():
            self._iterator = iter(loader)

    def __next__(self) -> list[_Made]:
        return next(self._iterator)

    def close(self) -> None:
        iterator: Any = self._iterator
        # Dropping the last reference does this too, but a traceback in flight holds one.
        iterator._shutdown_workers()
        for worker in iterator._workers:  # that still start do not hear the SIGTERM which this has sent them
            worker.kill()
            worker.join()


def made_of_all(documents: Columns, make: Callable[[Document], _Made], num_workers: int) -> Iterator[_Made]:
    """Yield what is made of each document, in order, by `num_workers` processes or in this one."""
    source = SampleSource.of(documents, make)
    rows = range(len(documents))
    reads = (list(rows[begin : begin + _AT_A_TIME]) for begin in rows[::_AT_A_TIME])
    if not num_workers:
        for indices in reads:
            yield from source.each(indices)
        return
    with closing(_WorkerReads(source, reads, num_workers)) as made:
        for several in made:
            yield from several


def _collated(drawn: Drawn) -> Batch:
    batch = collate(drawn.samples)
    if drawn.rows is None:
        return batch
    return replace(batch, row=numbered(drawn.rows))


def validation_batches(
    documents: Columns, make_sample: Callable[[Document], Sample], batch_size: int, domains: Domains | None = None
) -> Iterator[Batch]:
    """Yield all documents once, in order; the last batch may be short."""
    samples = SampleSource.of(documents, make_sample)
    for start in range(0, len(documents), batch_size):
        stop = min(start + batch_size, len(documents))
        yield in_domains(collate(samples.__getitems__(list(range(start, stop)))), domains, start)


def _unchanged(made: list[_Made]) -> list[_Made]:
    return made


def _set_up_worker(worker_id: int) -> None:
    """Limit libraries to one thread a worker; the loader sees to torch's."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.setsid()
    for number in _ENDING:
        # Forgets one that has come to the whole group since the start.
        signal.signal(number, signal.SIG_IGN)
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


@contextmanager
def _children_apart() -> Iterator[None]:
    """Keep signals that a terminal or scheduler sends to the driver's process group from processes started inside.

    The driver handles these signals and closes the processes. Those block SIGINT for ever, and `_ENDING` until they
    have their own session: a signal after that is sent to them alone, as by `multiprocessing` at the end.
    """
    # Started here, because its own start would unblock signals again before the workers start.
    resource_tracker.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
