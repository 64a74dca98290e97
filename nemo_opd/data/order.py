"""Batch order, determined by the seed and the batch's index in the run, and the packing of rows.

`_DocumentOrder.of_epoch` shuffles the documents of an epoch; `PackedOrder._rows` shuffles the rows of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_opd.alignment.merge import jit
from nemo_opd.data.samples import Sample
from nemo_opd.errors import CheckpointError

State = Mapping[str, int]
"""Position between two batches of a run, with the settings it depends on, for resuming."""

BLOCK = 4096
"""Windows in a block, within which rows are packed: fewer leave more unused room in rows, more take more memory."""
BLOCK_TOKENS, BLOCK_ROWS = 2**21, 64
"""A block of long windows ends after BLOCK_TOKENS student tokens, or those of BLOCK_ROWS rows if more."""
_DOCUMENTS_AT_A_TIME = 16
"""Documents read at a time."""

_Windows = tuple[Sample, ...]

Lengths = NDArray[np.int64]
"""[N]: the student's tokens of N segments."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples of a batch, before collation."""

    samples: list[Sample]
    rows: list[int] | None
    """Number of samples in each row; None if each sample is a row."""
    state: State
    """Position after the batch."""


@dataclass(frozen=True)
class _DocumentOrder(ABC):
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
class BatchOrder(_DocumentOrder):
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
            yield Drawn(samples, None, self.place(number))

    def starting_at(self, position: int) -> Iterator[list[int]]:
        """Yield the document indices of batch `position` and of all later ones."""
        epoch, step = divmod(position, self.steps_per_epoch)
        while True:
            order = self.of_epoch(epoch)
            for start in range(step * self.batch_size, self.num_documents, self.batch_size):
                yield order[start : start + self.batch_size].tolist()
            epoch, step = epoch + 1, 0


@dataclass(frozen=True)
class PackedOrder(_DocumentOrder):
    """Batches of `batch_size` rows, each packed with windows of documents; the last of an epoch may be short.

    An epoch is cut into blocks of consecutive documents, with `BLOCK` windows or fewer long ones; rows are packed
    within a block. So a batch does not depend on how batches are read, and only its block's documents are needed to
    reach it. Teachers change neither order nor rows.
    """

    limit: int = 0
    """Longest row in the student's tokens."""

    @property
    def settings(self) -> dict[str, int]:
        return {**super().settings, "block": BLOCK, "block_tokens": self._block_tokens}

    def require_same(self, state: State) -> None:
        """Raise CheckpointError if a state belongs to another order, such as those of versions up to 0.1."""
        if "limit_0" in state:
            raise CheckpointError(
                "the checkpoint is of a version that packed texts by the limits of all models, so its next batch is "
                "not known here; start a new run with another run.output_dir, or continue with that version"
            )
        super().require_same(state)

    @property
    def start(self) -> State:
        return self._place(0, 0, _Block(0, 0), 0)

    def epoch_at(self, state: State) -> int:
        """Return the epoch of the batch before a position."""
        return state["last_epoch"]

    def reads(self, state: State) -> Iterator[list[int]]:
        """Yield the documents to read from a position on, starting with its block."""
        epoch, first = state["epoch"], state["first"]
        while True:
            order = self.of_epoch(epoch)
            for begin in range(first, self.num_documents, _DOCUMENTS_AT_A_TIME):
                yield order[begin : begin + _DOCUMENTS_AT_A_TIME].tolist()
            epoch, first = epoch + 1, 0

    def draws(self, state: State, results: Iterator[list[_Windows]]) -> Iterator[Drawn]:
        """Yield the batches from a position on. results: windows of each document of `reads`.

        While rows of one block are drawn, the next block is read at the same pace.
        """
        documents = (windows for read in results for windows in read)
        block, num_drawn, number = _Block(state["epoch"], state["first"]), state["taken"], state["num_batches"]
        self._read(block, documents, 1.0)
        batch: list[list[Sample]] = []
        while True:
            rows, following = self._rows(block), self._after(block)
            for i in range(num_drawn, len(rows)):
                batch.append([block.windows[index] for index in rows[i]])
                self._read(following, documents, (i + 1) / len(rows))
                is_last = i + 1 == len(rows)
                if len(batch) == self.batch_size or (is_last and following.first == 0):
                    number += 1
                    after = self._place(number, block.epoch, *((following, 0) if is_last else (block, i + 1)))
                    samples = [sample for row in batch for sample in row]
                    yield Drawn(samples, [len(row) for row in batch], after)
                    batch = []
            block, num_drawn = following, 0

    def num_batches(self, epoch: int, lengths: Sequence[Lengths]) -> int:
        """Return the number of batches of an epoch. lengths: window lengths of each document, from `lengths_of`."""
        order, first, rows = self.of_epoch(epoch).tolist(), 0, 0
        while first < self.num_documents:
            parts: list[Lengths] = []
            num_windows = num_tokens = 0
            while first < self.num_documents and self._fullness(num_windows, num_tokens) < 1:
                parts.append(lengths[order[first]])
                num_windows += len(parts[-1])
                num_tokens += int(parts[-1].sum())
                first += 1
            rows += len(packed_rows(np.concatenate(parts), self.limit))
        return -(-rows // self.batch_size)

    def _place(self, num_batches: int, last_epoch: int, block: _Block, num_drawn: int) -> State:
        return {
            "num_batches": num_batches,
            "last_epoch": last_epoch,
            "epoch": block.epoch,
            "first": block.first,
            "taken": num_drawn,
            **self.settings,
        }

    def _read(self, block: _Block, documents: Iterator[_Windows], share: float) -> None:
        """Read documents into a block until it is full to this share."""
        while (
            self._fullness(len(block.windows), block.num_tokens) < share
            and block.first + block.num_documents < self.num_documents
        ):
            windows = next(documents)
            block.windows += windows
            block.num_tokens += int(lengths_of(windows).sum())
            block.num_documents += 1

    def _fullness(self, num_windows: int, num_tokens: int) -> float:
        """Return how full a block is. It ends with the document that brings it to 1."""
        return max(num_windows / BLOCK, num_tokens / self._block_tokens)

    @property
    def _block_tokens(self) -> int:
        return max(BLOCK_TOKENS, BLOCK_ROWS * self.limit)

    def _after(self, block: _Block) -> _Block:
        """Return the block after a fully read one, without windows."""
        stop = block.first + block.num_documents
        return _Block(block.epoch, stop) if stop < self.num_documents else _Block(block.epoch + 1, 0)

    def _rows(self, block: _Block) -> list[NDArray[np.int64]]:
        """Return the windows of each row of a block."""
        rows = packed_rows(lengths_of(block.windows), self.limit)
        if not self.shuffle:
            return sorted(rows, key=lambda row: int(row[0]))
        draw = np.random.default_rng((self.seed, block.epoch, block.first))
        return [rows[i] for i in draw.permutation(len(rows))]


@dataclass
class _Block:
    """Consecutive documents of an epoch."""

    epoch: int
    first: int
    """Position of the first document in the epoch's order."""
    num_documents: int = 0
    """Documents read so far."""
    num_tokens: int = 0
    """Student tokens of these documents."""
    windows: list[Sample] = field(default_factory=list)


def lengths_of(windows: Sequence[Sample]) -> Lengths:
    """Return the student's tokens of windows [N]; an empty one has a token of padding."""
    return np.array([max(1, len(window.student)) for window in windows], np.int64)


def packed_rows(lengths: Lengths, limit: int) -> list[NDArray[np.int64]]:
    """Pack segments into rows of at most `limit` tokens; return the segments of each row.

    Best fit decreasing: the longest first, each into the row with the least room left after it. A segment longer than
    the limit has a row to itself.
    """
    row = _best_fit(lengths, limit, np.argsort(-lengths, kind="stable"))
    by_row = np.argsort(row, kind="stable")
    return np.split(by_row, np.flatnonzero(np.diff(row[by_row])) + 1) if len(row) else []


@jit
def _best_fit(lengths: Lengths, limit: int, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of each segment [N]. Rows that cannot hold the shortest segment are no longer tried."""
    number = len(lengths)
    shortest = lengths[order[-1]] if number else 0
    room = np.empty(number, np.int64)
    row = np.empty(number, np.int64)
    open_rows = np.empty(number, np.int64)
    num_rows, num_open = 0, 0
    for segment in order:
        best, least = -1, 0
        for place in range(num_open):
            room_left = room[open_rows[place]] - lengths[segment]
            if room_left >= 0 and (best < 0 or room_left < least):
                best, least = place, room_left
        if best < 0:
            best = num_open
            open_rows[best] = num_rows
            room[num_rows] = limit
            num_rows, num_open = num_rows + 1, num_open + 1
        target = open_rows[best]
        row[segment] = target
        room[target] -= lengths[segment]
        if room[target] < shortest:
            num_open -= 1
            open_rows[best] = open_rows[num_open]
    return row
