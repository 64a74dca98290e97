"""Packed batch order: which windows make up each row and which rows each batch, by length (methods.md §8.6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.order import DocumentOrder, Drawn, State
from nemo_opd.data.packing import Lengths, packed_rows
from nemo_opd.data.samples import Sample, Tokens

BLOCK = 4096
"""Windows in a block, within which rows are packed: fewer leave more unused room in rows, more take more memory."""
BLOCK_TOKENS, BLOCK_ROWS = 2**21, 64
"""A block of long windows ends after BLOCK_TOKENS student tokens, or those of BLOCK_ROWS rows if more."""
_AT_A_TIME = 16
"""Documents read at a time."""

_Windows = tuple[Sample, ...]


@dataclass(frozen=True)
class PackedOrder(DocumentOrder):
    """Batches of `batch_size` rows, each packed with windows of documents; the last of an epoch may be short.

    An epoch is cut into blocks of consecutive documents, with `BLOCK` windows or fewer long ones; rows are packed
    within a block. So a batch does not depend on how batches are read, and only its block's documents are needed to
    reach it.
    """

    limits: tuple[int, ...] = ()
    """Longest row in tokens, for the student and for each teacher."""

    @property
    def settings(self) -> dict[str, int]:
        values = asdict(self)
        limits = values.pop("limits")
        return {
            **{name: int(value) for name, value in values.items()},
            **{f"limit_{i}": limit for i, limit in enumerate(limits)},
            "block": BLOCK,
            "block_tokens": self._block_tokens,
        }

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
            for begin in range(first, self.num_documents, _AT_A_TIME):
                yield order[begin : begin + _AT_A_TIME].tolist()
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
                    yield Drawn(samples, [len(row) for row in batch], block.epoch, after)
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
                num_tokens += int(parts[-1][:, 0].sum())
                first += 1
            rows += len(packed_rows(np.concatenate(parts), self.limits))
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
            block.num_tokens += sum(_length(window.student) for window in windows)
            block.num_documents += 1

    def _fullness(self, num_windows: int, num_tokens: int) -> float:
        """Return how full a block is. It ends with the document that brings it to 1."""
        return max(num_windows / BLOCK, num_tokens / self._block_tokens)

    @property
    def _block_tokens(self) -> int:
        return max(BLOCK_TOKENS, BLOCK_ROWS * self.limits[0])

    def _after(self, block: _Block) -> _Block:
        """Return the block after a fully read one, without windows."""
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
    """Position of the first document in the epoch's order."""
    num_documents: int = 0
    """Documents read so far."""
    num_tokens: int = 0
    """Student tokens of these documents."""
    windows: list[Sample] = field(default_factory=list)


def lengths_of(windows: Sequence[Sample]) -> Lengths:
    """Return the tokens of windows for the student and each teacher, [N, 1 + teachers].

    A model that reads nothing has one token of padding.
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
