"""Batch order, determined by the seed and the batch's index in the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch

from nemo_opd.data.samples import Sample
from nemo_opd.errors import CheckpointError

State = Mapping[str, int]
"""Position between two batches of a run, with the settings it depends on, for resuming."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples of a batch, before collation."""

    samples: list[Sample]
    rows: list[int] | None
    """Number of samples in each row; None if each sample is a row."""
    epoch: int
    """Counted from 0."""
    state: State
    """Position after the batch."""


@dataclass(frozen=True)
class DocumentOrder(ABC):
    """Endless epochs over `num_documents`, each in its own order."""

    num_documents: int
    batch_size: int
    seed: int
    shuffle: bool

    @property
    @abstractmethod
    def start(self) -> State:
        """Position before the first batch."""

    @property
    def settings(self) -> dict[str, int]:
        """Settings besides the data that determine the batches."""
        return {name: int(value) for name, value in asdict(self).items()}

    def require_same(self, state: State) -> None:
        """Raise CheckpointError if a state belongs to another order."""
        settings = self.settings
        for name in (*settings, *(state.keys() - self.start.keys())):
            if state.get(name) != settings.get(name):
                saved, current = ("none" if value is None else value for value in (state.get(name), settings.get(name)))
                raise CheckpointError(
                    f"the checkpoint's data order has {name}={saved}, this run has {name}={current}, so the next batch "
                    "is not defined; restore the data settings, or set run.resume=never and a new run.output_dir"
                )

    def of_epoch(self, epoch: int) -> torch.Tensor:
        """Return the document order of an epoch: int64 [documents]."""
        if not self.shuffle:
            return torch.arange(self.num_documents)
        return torch.randperm(self.num_documents, generator=torch.Generator().manual_seed(self.seed + epoch))


@dataclass(frozen=True)
class BatchOrder(DocumentOrder):
    """Batches of `batch_size` documents; the last of an epoch may be short.

    Batch n does not depend on how batches are read, and can be reached without reading the ones before it.
    """

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_documents // self.batch_size)

    def place(self, num_batches: int) -> dict[str, int]:
        """Return the position after `num_batches` batches."""
        return {"num_batches": num_batches, **self.settings}

    def num_batches_at(self, state: State) -> int:
        """Return the number of batches before a position. Raises CheckpointError for another order."""
        self.require_same(state)
        return state["num_batches"]

    @property
    def start(self) -> State:
        return self.place(0)

    def epoch_at(self, state: State) -> int:
        """Return the epoch of the batch before a position."""
        return max(0, state["num_batches"] - 1) // self.steps_per_epoch

    def reads(self, state: State) -> Iterator[list[int]]:
        """Yield the documents to read from a position on, one batch at a time."""
        return self.starting_at(state["num_batches"])

    def draws(self, state: State, results: Iterator[list[Sample]]) -> Iterator[Drawn]:
        """Yield the batches from a position on. results: a sample for each document of `reads`."""
        for number, samples in enumerate(results, state["num_batches"] + 1):
            after = self.place(number)
            yield Drawn(samples, None, self.epoch_at(after), after)

    def starting_at(self, position: int) -> Iterator[list[int]]:
        """Yield the document indices of batch `position` and of all later ones."""
        epoch, step = divmod(position, self.steps_per_epoch)
        while True:
            order = self.of_epoch(epoch)
            for start in range(step * self.batch_size, self.num_documents, self.batch_size):
                yield order[start : start + self.batch_size].tolist()
            epoch, step = epoch + 1, 0
