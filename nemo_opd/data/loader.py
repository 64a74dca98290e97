"""Batches for training, endless and resumable, and for validation, once and in order."""

import os
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from nemo_opd.data.collate import collate
from nemo_opd.data.documents import Columns, Document, read_documents
from nemo_opd.data.mapped import MappedFiles
from nemo_opd.data.order import BatchOrder
from nemo_opd.data.samples import Sample
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.types import Batch

Samples = list[Sample]
_MakeSample = Callable[[Document], Sample]
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class SampleSource:
    """Samples by lists of indices. Picklable: a copy is in every worker."""

    columns: Columns
    make_sample: _MakeSample
    files: MappedFiles

    @classmethod
    def of(cls, columns: Columns, make_sample: _MakeSample) -> Self:
        return cls(columns, make_sample, MappedFiles.of(columns))

    def __getitems__(self, indices: list[int]) -> Samples:
        return list(self.each(indices))

    def each(self, indices: list[int]) -> Iterator[Sample]:
        """Made one by one, as they are asked for. Raises DataError, with the row, for what cannot be read or used."""
        self.files.check(indices)
        for index, document in zip(indices, read_documents(self.columns, indices), strict=True):
            try:
                sample = self.make_sample(document)
            except (AlignmentError, DataError) as error:
                raise DataError(f"row {index} (counted from 0 over all files) cannot be used: {error}") from error
            yield sample


@contextmanager
def lost_workers() -> Iterator[None]:
    """Inside, a data worker that is killed is a DataError: torch raises its own wherever this process happens to be."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(
            f"{str(error).strip().rstrip('.')}; see whether the machine's memory is full, or lower data.num_workers; "
            "run.resume=auto continues from the last checkpoint"
        ) from error


class TrainLoader:
    """Training batches in the order of BatchOrder, made ahead while the caller does other things.

    That is done by `num_workers` spawned processes, or by a thread where there are none. The order depends neither on
    the number of workers nor on how batches are sharded. Close it, or use it as a context manager.
    """

    timed_as = "data_wait_s"

    def __init__(
        self,
        documents: Columns,
        sample_maker: _MakeSample,
        batch_size: int,
        seed: int,
        shuffle: bool,
        num_workers: int,
    ) -> None:
        self._samples = SampleSource.of(documents, sample_maker)
        self._order = BatchOrder(len(documents), batch_size, seed, shuffle)
        self._num_workers = num_workers
        self._num_batches = 0
        self._reader: _Thread | _Workers | None = None

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    @property
    def epoch(self) -> int:
        """Epoch, counted from 0, of the batch that was returned last."""
        return max(0, self._num_batches - 1) // self.steps_per_epoch

    def start(self) -> None:
        """Begin to read ahead; `next` does it too."""
        if self._reader is None:
            indices = self._order.starting_at(self._num_batches)
            workers = self._num_workers
            self._reader = _Workers(self._samples, indices, workers) if workers else _Thread(self._samples, indices)

    def next(self) -> Batch:
        """Return the next batch; the last of an epoch may be short. Raises errors of reading and aligning."""
        self.start()
        assert self._reader is not None
        batch = self._reader.next()
        self._num_batches += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the place in the run, and what it depends on."""
        return self._order.place(self._num_batches)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to where the state was taken.

        Raises CheckpointError when that was with other data, batch size, seed or shuffling.
        """
        num_batches = self._order.num_batches_at(state)
        self.close()
        self._num_batches = num_batches

    def close(self) -> None:
        """End what reads ahead. Reading on starts anew, at the next batch."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Thread:
    """Makes a batch while the one before it is in use."""

    def __init__(self, samples: SampleSource, indices: Iterator[list[int]]) -> None:
        self._samples = samples
        self._indices = indices
        self._is_closed = False
        self._has_own_maker = False
        self._executor = ThreadPoolExecutor(1, "data")
        self._ahead = self._executor.submit(self._make)

    def next(self) -> Batch:
        batch = self._ahead.result()
        self._ahead = self._executor.submit(self._make)
        return batch

    def close(self) -> None:
        """Waits for the sample that is being made."""
        self._is_closed = True
        self._executor.shutdown(cancel_futures=True)

    def _make(self) -> Batch:
        if not self._has_own_maker:
            # Tokenizers and database connections cannot be used by two threads at once.
            self._samples = replace(self._samples, make_sample=pickle.loads(pickle.dumps(self._samples.make_sample)))
            self._has_own_maker = True
        samples: Samples = []
        for sample in self._samples.each(next(self._indices)):
            if self._is_closed:
                raise CancelledError
            samples.append(sample)
        return collate(samples)


class _Workers:
    """PyTorch's data workers, two batches each ahead."""

    def __init__(self, samples: SampleSource, indices: Iterator[list[int]], num_workers: int) -> None:
        loader: DataLoader[Samples] = DataLoader(
            samples,  # type: ignore[arg-type]
            batch_sampler=indices,
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

    def next(self) -> Batch:
        # Here and not in the workers: unpadded arrays go through a pipe, padded tensors would go through shared memory.
        return collate(next(self._iterator))

    def close(self) -> None:
        iterator: Any = self._iterator
        # Dropping the last reference does this too, but a traceback in flight holds one.
        iterator._shutdown_workers()
        for worker in iterator._workers:  # that still start do not hear the SIGTERM which this has sent them
            worker.kill()
            worker.join()


def validation_batches(documents: Columns, sample_maker: _MakeSample, batch_size: int) -> Iterator[Batch]:
    """Yield all documents once, in order; the last batch may be short."""
    samples = SampleSource.of(documents, sample_maker)
    for start in range(0, len(documents), batch_size):
        stop = min(start + batch_size, len(documents))
        yield collate(samples.__getitems__(list(range(start, stop))))


def _unchanged(samples: Samples) -> Samples:
    return samples


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
    """Processes started inside are not reached by what a terminal or scheduler sends to the driver's process group.

    That is for the driver, who closes them. They block SIGINT for ever, and `_ENDING` until they have their own
    session: then one of these is for them, as from `multiprocessing` at the end.
    """
    # Started here, because its own start would unblock signals again before the workers start.
    resource_tracker.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
