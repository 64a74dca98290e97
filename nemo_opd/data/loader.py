"""Batches for training, endless and resumable, and for validation, once and in order."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from typing import Self

import torch
from torch.utils.data import DataLoader

from nemo_opd.data.collate import collate
from nemo_opd.data.documents import Columns, Document, read_documents
from nemo_opd.data.order import BatchOrder
from nemo_opd.data.samples import Sample
from nemo_opd.errors import CheckpointError
from nemo_opd.types import Batch

Samples = list[Sample]
MakeSample = Callable[[Document], Sample]


@dataclass(frozen=True)
class SampleSource:
    """Samples by lists of indices. Picklable: a copy is in every worker."""

    columns: Columns
    make_sample: MakeSample

    def __getitems__(self, indices: list[int]) -> Samples:
        return [self.make_sample(document) for document in read_documents(self.columns, indices)]


class TrainLoader:
    """Training batches in the order of BatchOrder, read ahead by `num_workers` spawned processes (0: by the caller).

    The order depends neither on the number of workers nor on how batches are sharded.
    Close it, or use it as a context manager.
    """

    def __init__(
        self,
        documents: Columns,
        sample_maker: MakeSample,
        batch_size: int,
        seed: int,
        shuffle: bool,
        num_workers: int,
    ) -> None:
        self._samples = SampleSource(documents, sample_maker)
        self._order = BatchOrder(len(documents), batch_size, seed, shuffle)
        self._num_workers = num_workers
        self._num_batches = 0
        self._iterator: Iterator[Samples] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    @property
    def epoch(self) -> int:
        """Epoch, counted from 0, of the batch that was returned last."""
        return max(0, self._num_batches - 1) // self.steps_per_epoch

    def next(self) -> Batch:
        """The next batch; the last of an epoch may be short. Raises what reading and aligning its documents raises."""
        if self._iterator is None:
            self._iterator = self._start()
        samples = next(self._iterator)
        self._num_batches += 1
        # Here and not in the workers: unpadded arrays go through a pipe, padded tensors would go through shared memory.
        return collate(samples)

    def state_dict(self) -> dict[str, int]:
        """The place in the run, and what it depends on."""
        return {"num_batches": self._num_batches, **{name: int(value) for name, value in asdict(self._order).items()}}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to where the state was taken.

        Raises CheckpointError when that was with other data, batch size, seed or shuffling.
        """
        for name, value in self.state_dict().items():
            if name != "num_batches" and state.get(name) != value:
                raise CheckpointError(
                    f"the checkpoint's data order has {name}={state.get(name)}, this run has {name}={value}, so the"
                    " next batch is not defined; restore the data settings, or set run.resume=never and a new"
                    " run.output_dir"
                )
        self.close()
        self._num_batches = state["num_batches"]

    def close(self) -> None:
        """End the workers. Reading on starts others, at the next batch."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and self._num_workers:
            # Dropping the last reference does this too, but a traceback in flight holds one.
            iterator._shutdown_workers()  # type: ignore[attr-defined]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> Iterator[Samples]:
        loader: DataLoader[Samples] = DataLoader(
            self._samples,  # type: ignore[arg-type]
            batch_sampler=_Resumed(self._order, self._num_batches),
            num_workers=self._num_workers,
            collate_fn=_unchanged,
            worker_init_fn=_set_up_worker,
            # The loader draws a seed for its workers; not from the caller's global generator.
            generator=torch.Generator(),
            # A forked child would inherit locks held by threads of this process (Ray, pyarrow, tokenizers).
            multiprocessing_context="spawn" if self._num_workers else None,
        )
        with _children_without_sigint():
            return iter(loader)


def validation_batches(documents: Columns, sample_maker: MakeSample, batch_size: int) -> Iterator[Batch]:
    """All documents once, in order; the last batch may be short."""
    samples = SampleSource(documents, sample_maker)
    for start in range(0, len(documents), batch_size):
        stop = min(start + batch_size, len(documents))
        yield collate(samples.__getitems__(list(range(start, stop))))


@dataclass(frozen=True)
class _Resumed:
    """A batch sampler that starts at a place."""

    order: BatchOrder
    position: int

    def __iter__(self) -> Iterator[list[int]]:
        return self.order.starting_at(self.position)


def _unchanged(samples: Samples) -> Samples:
    return samples


def _set_up_worker(worker_id: int) -> None:
    """One thread a worker; the loader sees to torch's."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@contextmanager
def _children_without_sigint() -> Iterator[None]:
    """Processes started inside block SIGINT from their first instruction: Ctrl-C is the driver's, who closes them."""
    # Started here, because its own start would unblock SIGINT again before the workers start.
    resource_tracker.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
