"""Batches: endless and resumable for training, a single ordered pass for validation, with the texts' domains."""

from __future__ import annotations

import os
import pickle
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nemo_opd.data.collate import collate, row_ids
from nemo_opd.data.order import Drawn, State
from nemo_opd.data.row_types import Columns, Document, read_documents
from nemo_opd.data.samples import Sample
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.types import Batch, Closing

if TYPE_CHECKING:
    import datasets

    from nemo_opd.data.document_sources import MappedFiles

_MAX_DOMAINS = 20
_OTHER_DOMAINS, _NO_DOMAIN = "others", "without"
_DOCUMENTS_AT_A_TIME = 16
"""Documents per read when all are read."""
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

_Result = TypeVar("_Result")


class _Order(Protocol[_Result]):
    """The order of batches: a BatchOrder or a PackedOrder."""

    @property
    def start(self) -> State: ...

    def require_same(self, state: State) -> None: ...

    def epoch_at(self, state: State) -> int: ...

    def reads(self, state: State) -> Iterator[list[int]]: ...

    def draws(self, state: State, results: Iterator[list[_Result]]) -> Iterator[Drawn]: ...


class TrainLoader(Closing, Generic[_Result]):
    """Training batches in order, prepared in the background.

    `num_workers` spawned processes prepare them, or one thread if it is 0. The order is independent of the number of
    workers and of sharding. Close it, or use it as a context manager.
    """

    timed_as = "data_wait_s"

    def __init__(
        self, documents: Columns, make: Callable[[Document], _Result], order: _Order[_Result], num_workers: int
    ) -> None:
        self._source = SampleSource.of(documents, make)
        self._order = order
        self._num_workers = num_workers
        self._state = order.start
        self._reader: _Thread[_Result] | _Workers[_Result] | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the last batch returned, counted from 0."""
        return self._order.epoch_at(self._state)

    def start(self) -> None:
        """Begin to read ahead; `next` does so, too."""
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
        """Return the position in the run and the settings it depends on."""
        return dict(self._state)

    def load_state_dict(self, state: State) -> None:
        """Go to the position of a state.

        Raises CheckpointError if it was taken with other data or another batch size, seed, shuffling or packing.
        """
        self._order.require_same(state)
        self.close()
        self._state = dict(state)

    def close(self) -> None:
        """Stop reading ahead. Reading can start again at the next batch."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def validation_batches(
    documents: Columns, make_sample: Callable[[Document], Sample], batch_size: int, domains: Domains | None = None
) -> Iterator[Batch]:
    """Yield all documents once, in order, in batches; the last may be short."""
    samples = SampleSource.of(documents, make_sample)
    for start in range(0, len(documents), batch_size):
        stop = min(start + batch_size, len(documents))
        yield in_domains(collate(samples.__getitems__(list(range(start, stop)))), domains, start)


def made_of_all(documents: Columns, make: Callable[[Document], _Result], num_workers: int) -> Iterator[_Result]:
    """Yield the result for each document, in order, from `num_workers` processes, or from this one if 0."""
    source = SampleSource.of(documents, make)
    rows = range(len(documents))
    reads = (list(rows[begin : begin + _DOCUMENTS_AT_A_TIME]) for begin in rows[::_DOCUMENTS_AT_A_TIME])
    if not num_workers:
        for indices in reads:
            yield from source.each(indices)
        return
    with closing(_WorkerReads(source, reads, num_workers)) as batches:
        for results in batches:
            yield from results


@contextmanager
def lost_workers() -> Iterator[None]:
    """Turn torch's error for a killed data worker, raised wherever this process is, into a DataError."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(
            f"{str(error).strip().rstrip('.')}; check whether the machine's memory is full, or lower data.num_workers; "
            "run.resume=auto continues from the last checkpoint"
        ) from error


@dataclass(frozen=True, slots=True)
class Domains:
    """Domains of documents, the most frequent first."""

    names: tuple[str, ...]
    """The `_MAX_DOMAINS` most frequent at most, then `others` if there are more."""
    numbers: Tensor
    """int64: index in `names` for each document."""

    @staticmethod
    def of(values: Sequence[object]) -> Domains:
        """Number the domains of documents; documents without a value are in the domain `without`."""
        labels = [_NO_DOMAIN if value is None else str(value) for value in values]
        ranked = [name for name, _ in Counter(sorted(labels)).most_common()]
        names = ranked[:_MAX_DOMAINS] + [_OTHER_DOMAINS] * (len(ranked) > _MAX_DOMAINS)
        number = {name: min(i, _MAX_DOMAINS) for i, name in enumerate(ranked)}
        return Domains(tuple(names), torch.tensor([number[name] for name in labels]))


def domains_of(documents: datasets.Dataset, column: str | None, rows: Sequence[int] | None = None) -> Domains | None:
    """Return the domains of documents, or of some of their rows; None if `column` is None."""
    if column is None:
        return None
    values = documents.select_columns([column])[:][column]
    return Domains.of(values if rows is None else [values[row] for row in rows])


def in_domains(batch: Batch, domains: Domains | None, start: int) -> Batch:
    """Add their domains to a batch of consecutive documents that begins at document `start`."""
    if domains is None:
        return batch
    return replace(batch, domain=domains.numbers[start : start + len(batch)])


@dataclass(frozen=True)
class SampleSource(Generic[_Result]):
    """Samples or windows of documents, indexed by lists of rows. Picklable: each worker has a copy."""

    columns: Columns
    make: Callable[[Document], _Result]
    """A SampleMaker or a WindowMaker."""
    files: MappedFiles

    @classmethod
    def of(cls, columns: Columns, make: Callable[[Document], _Result]) -> Self:
        from nemo_opd.data.document_sources import MappedFiles

        return cls(columns, make, MappedFiles.of(columns))

    def __getitems__(self, indices: list[int]) -> list[_Result]:
        return list(self.each(indices))

    def each(self, indices: list[int]) -> Iterator[_Result]:
        """Yield the result for each document. Raises DataError, naming the row, if it cannot be read or used."""
        self.files.check(indices)
        for index, document in zip(indices, read_documents(self.columns, indices), strict=True):
            try:
                result = self.make(document)
            except (AlignmentError, DataError) as error:
                raise DataError(f"row {index} (counted from 0 over all files) cannot be used: {error}") from error
            yield result


class _Thread(Generic[_Result]):
    """A thread that makes the next batch while the current one is in use."""

    def __init__(self, source: SampleSource[_Result], order: _Order[_Result], state: State) -> None:
        self._reading = _ThreadReader(source)
        self._executor = ThreadPoolExecutor(1, "data")
        self._batches = map(_collated, order.draws(state, map(self._reading, order.reads(state))))
        self._ahead = self._executor.submit(next, self._batches)

    def next(self) -> tuple[Batch, State]:
        batch = self._ahead.result()
        self._ahead = self._executor.submit(next, self._batches)
        return batch

    def close(self) -> None:
        """Wait for the document being read, and end the thread."""
        self._reading.is_closed = True
        self._executor.shutdown(cancel_futures=True)


class _ThreadReader(Generic[_Result]):
    """A reader of documents for another thread, usable until closed."""

    def __init__(self, source: SampleSource[_Result]) -> None:
        self._source = source
        self.is_closed = False

    @cached_property
    def _thread_source(self) -> SampleSource[_Result]:
        """The thread's own copy: tokenizers and database connections cannot be shared between threads."""
        return replace(self._source, make=pickle.loads(pickle.dumps(self._source.make)))

    def __call__(self, indices: list[int]) -> list[_Result]:
        """Return the results for the documents. Raises CancelledError once it is closed."""
        results: list[_Result] = []
        for result in self._thread_source.each(indices):
            if self.is_closed:
                raise CancelledError
            results.append(result)
        return results


class _Workers(Generic[_Result]):
    """Batches of documents that worker processes read ahead."""

    def __init__(self, source: SampleSource[_Result], order: _Order[_Result], state: State, num_workers: int) -> None:
        self._reads = _WorkerReads(source, order.reads(state), num_workers)
        # Collate here, not in workers: unpadded arrays go through a pipe, padded tensors through shared memory.
        self._batches = map(_collated, order.draws(state, self._reads))

    def next(self) -> tuple[Batch, State]:
        return next(self._batches)

    def close(self) -> None:
        self._reads.close()


class _WorkerReads(Iterator[list[_Result]]):
    """Results from PyTorch's data workers, each two reads ahead."""

    def __init__(self, source: SampleSource[_Result], reads: Iterator[list[int]], num_workers: int) -> None:
        loader: DataLoader[list[_Result]] = DataLoader(
            source,  # type: ignore[arg-type]
            batch_sampler=reads,
            num_workers=num_workers,
            collate_fn=_identity,
            worker_init_fn=_set_up_worker,
            # The loader draws a seed for its workers, which must not come from the caller's global generator.
            generator=torch.Generator(),
            # A forked child would inherit locks that threads of this process hold (Ray, pyarrow, tokenizers).
            multiprocessing_context="spawn",
        )
        with _without_inherited_signals():
            self._iterator = iter(loader)

    def __next__(self) -> list[_Result]:
        return next(self._iterator)

    def close(self) -> None:
        iterator: Any = self._iterator
        # Dropping the last reference would do this too, but a traceback in flight may hold one.
        iterator._shutdown_workers()
        for worker in iterator._workers:  # a worker that is still starting misses the SIGTERM it was sent
            worker.kill()
            worker.join()


def _collated(drawn: Drawn) -> tuple[Batch, State]:
    batch = collate(drawn.samples)
    return (batch if drawn.rows is None else replace(batch, row=row_ids(drawn.rows))), drawn.state


def _identity(results: list[_Result]) -> list[_Result]:
    return results


def _set_up_worker(worker_id: int) -> None:
    """Limit libraries to one thread per worker; the loader limits torch."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.setsid()
    for number in _END_SIGNALS:
        # Discards a signal sent to the whole group since the start.
        signal.signal(number, signal.SIG_IGN)
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)


@contextmanager
def _without_inherited_signals() -> Iterator[None]:
    """Shield processes started inside from signals that a terminal or scheduler sends to the driver's process group.

    The driver handles these signals and closes the processes, which always block SIGINT. They block `_END_SIGNALS`
    until they have their own session; a later signal is meant for them, such as the last one of `multiprocessing`.
    """
    # Started here, because its own start would unblock signals again before the workers start.
    resource_tracker.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_END_SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
