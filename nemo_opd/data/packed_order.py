"""Which windows of which documents make up which row, and which rows a batch: by their lengths (methods.md §8.6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.order import DocumentOrder, Drawn, State
from nemo_opd.data.packing import Lengths, packed_rows
from nemo_opd.data.samples import Sample, Tokens

BLOCK = 4096
"""Windows among which rows are made up: fewer leave more room in rows, more are held in memory."""
BLOCK_TOKENS, BLOCK_ROWS = 2**21, 64
"""Tokens of the student, or rows if those are more, after which a block of long windows ends."""
_AT_A_TIME = 16
"""Documents read at a time."""

_Windows = tuple[Sample, ...]


@dataclass(frozen=True)
class PackedOrder(DocumentOrder):
    """Batches of `batch_size` rows, each made up of windows of documents; the last of an epoch may be short.

    An epoch is cut into blocks of consecutive documents with `BLOCK` windows, or fewer long ones; rows are made up
    within a block. So a batch is the same whatever reads it, and is reached by reading the documents of its block
    alone.
    """

    limits: tuple[int, ...] = ()
    """Tokens of a row for the student and for each teacher."""

    @property
    def settings(self) -> dict[str, int]:
        own = asdict(self)
        limits = own.pop("limits")
        return {
            **{name: int(value) for name, value in own.items()},
            **{f"limit_{i}": limit for i, limit in enumerate(limits)},
            "block": BLOCK,
            "block_tokens": self._block_tokens,
        }

    @property
    def start(self) -> State:
        return self._place(0, 0, _Block(0, 0), 0)

    def epoch_at(self, state: State) -> int:
        """Return the epoch of the batch before a place."""
        return state["last_epoch"]

    def reads(self, state: State) -> Iterator[list[int]]:
        """Yield the documents to be read from a place on, in which its block begins."""
        epoch, first = state["epoch"], state["first"]
        while True:
            order = self.of_epoch(epoch)
            for begin in range(first, self.num_documents, _AT_A_TIME):
                yield order[begin : begin + _AT_A_TIME].tolist()
            epoch, first = epoch + 1, 0

    def draws(self, state: State, made: Iterator[list[_Windows]]) -> Iterator[Drawn]:
        """Yield the batches from a place on. made: the windows of each document of `reads`.

        While a block's rows are drawn, the next block is read at their pace.
        """
        documents = (windows for several in made for windows in several)
        block, taken, number = _Block(state["epoch"], state["first"]), state["taken"], state["num_batches"]
        self._read(block, documents, 1.0)
        batch: list[list[Sample]] = []
        while True:
            rows, following = self._rows(block), self._after(block)
            for i in range(taken, len(rows)):
                batch.append([block.windows[index] for index in rows[i]])
                self._read(following, documents, (i + 1) / len(rows))
                is_last = i + 1 == len(rows)
                if len(batch) == self.batch_size or (is_last and following.first == 0):
                    number += 1
                    after = self._place(number, block.epoch, *((following, 0) if is_last else (block, i + 1)))
                    samples = [sample for row in batch for sample in row]
                    yield Drawn(samples, [len(row) for row in batch], block.epoch, after)
                    batch = []
            block, taken = following, 0

    def num_batches(self, epoch: int, lengths: Sequence[Lengths]) -> int:
        """Return the batches of an epoch. lengths: of each document's windows, as `lengths_of` returns them."""
        order, first, rows = self.of_epoch(epoch).tolist(), 0, 0
        while first < self.num_documents:
            parts: list[Lengths] = []
            num_windows = num_tokens = 0
            while first < self.num_documents and self._fullness(num_windows, num_tokens) < 1:
                parts.append(lengths[order[first]])
                num_windows += len(parts[-1])
                num_tokens += int(parts[-1][:, 0].sum())
                first += 1
            rows += len(packed_rows(np.concatenate(parts), self.limits))
        return -(-rows // self.batch_size)

    def _place(self, num_batches: int, last_epoch: int, block: _Block, taken: int) -> State:
        return {
            "num_batches": num_batches,
            "last_epoch": last_epoch,
            "epoch": block.epoch,
            "first": block.first,
            "taken": taken,
            **self.settings,
        }

    def _read(self, block: _Block, documents: Iterator[_Windows], share: float) -> None:
        """Read documents of a block until it is full to this share."""
        while (
            self._fullness(len(block.windows), block.num_tokens) < share
            and block.first + block.num_documents < self.num_documents
        ):
            windows = next(documents)
            block.windows += windows
            block.num_tokens += sum(_length(window.student) for window in windows)
            block.num_documents += 1

    def _fullness(self, num_windows: int, num_tokens: int) -> float:
        """Return how full a block is; it ends with the document that brings it to 1."""
        return max(num_windows / BLOCK, num_tokens / self._block_tokens)

    @property
    def _block_tokens(self) -> int:
        return max(BLOCK_TOKENS, BLOCK_ROWS * self.limits[0])

    def _after(self, block: _Block) -> _Block:
        """Return the block after one that was read, without windows."""
        stop = block.first + block.num_documents
        return _Block(block.epoch, stop) if stop < self.num_documents else _Block(block.epoch + 1, 0)

    def _rows(self, block: _Block) -> list[NDArray[np.int64]]:
        """Return the windows of each row of a block."""
        rows = packed_rows(lengths_of(block.windows), self.limits)
        if not self.shuffle:
            return sorted(rows, key=lambda row: int(row[0]))
        draw = np.random.default_rng((self.seed, block.epoch, block.first))
        return [rows[i] for i in draw.permutation(len(rows))]


@dataclass
class _Block:
    """Consecutive documents of an epoch."""

    epoch: int
    first: int
    """Place of the first document in the epoch's order."""
    num_documents: int = 0
    """Documents read so far."""
    num_tokens: int = 0
    """The student's tokens of these."""
    windows: list[Sample] = field(default_factory=list)


def lengths_of(windows: Sequence[Sample]) -> Lengths:
    """Return the tokens of windows for the student and each teacher, [N, 1 + teachers]; padding counts where a model
    reads nothing.
    """
    return np.array(
        [
            [_length(window.student)]
            + [_length(teacher.tokens) if window.route in (None, i) else 1 for i, teacher in enumerate(window.teachers)]
            for window in windows
        ],
        np.int64,
    )


def _length(tokens: Tokens) -> int:
    return max(1, len(tokens))
