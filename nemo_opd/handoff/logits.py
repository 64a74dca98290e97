"""Full-vocabulary logits: the reference mode (METHODS §9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nemo_opd.handoff.base import Handle, Receiver, Sender
from nemo_opd.handoff.plan import ONE_READER, Readers
from nemo_opd.handoff.region import Region
from nemo_opd.handoff.shards import within_vocabulary
from nemo_opd.handoff.written import Written, WrittenRows
from nemo_opd.logits.combined import SideBySideLogits
from nemo_opd.logits.head import HeadLogits
from nemo_opd.logits.rows import LogitRows, TensorLogits


@dataclass(frozen=True, slots=True)
class LogitsHandle:
    """To the logits that a teacher's rank has of a batch: [b, its positions, its columns]."""

    logits: Handle
    columns: range
    """Of the tokenizer's vocabulary."""
    written: tuple[Written, ...]

    def rows(self, receiver: Receiver, texts: slice, width: int) -> LogitRows:
        """Of a buffer that is a window as it is: see `LogitsWindow.rows`."""
        return LogitsWindow((Region.whole(self.logits),)).rows(receiver, texts, width)


@dataclass(frozen=True, slots=True)
class LogitsWindow:
    """The logits [B, T, W] of a student rank's rows, wherever they are."""

    shards: tuple[Region, ...]
    """One after another in columns."""

    def rows(self, receiver: Receiver, texts: slice, width: int) -> LogitRows:
        """Of some texts, up to `width` positions.

        A view of the buffer where one has them; shards of the columns are read side by side where they are; rows or
        positions of several buffers are copied together. Raises HandoffError for a buffer that cannot be mapped.
        """
        shards = [TensorLogits(shard.read(receiver, texts, width)) for shard in self.shards]
        return shards[0] if len(shards) == 1 else SideBySideLogits(shards)


class LogitsWriter:
    """Collects the logits of a batch, microbatch by microbatch, in a buffer."""

    def __init__(
        self,
        new_sender: Callable[[Sequence[int]], Sender],
        vocab_size: int,
        dtype: torch.dtype,
        *,
        columns: range | None = None,
        readers: Readers = ONE_READER,
        num_slots: int = 1,
    ) -> None:
        """columns: of the vocabulary, that this rank's logits are of; by default all. Those beyond `vocab_size`, which
        a padded head has, are left out. dtype: of the buffer. readers: who will map it. num_slots: batches whose logits
        are kept at once.
        """
        self._slots = [new_sender(readers.output) for _ in range(num_slots)]
        self._sender, self._dtype = self._slots[0], dtype
        self._columns = within_vocabulary(columns, vocab_size)

    def begin(self, num_texts: int, width: int, slot: int = 0) -> None:
        """width: positions of this rank, the most that a microbatch has. slot: whose batch is overwritten."""
        self._sender = self._slots[slot]
        self._sender.tensor((num_texts, width, len(self._columns)), self._dtype)
        self._written = WrittenRows(num_texts, width)

    def write(self, start: int, made: TensorLogits | HeadLogits, positions: Sequence[range] | None = None) -> None:
        """Put a microbatch's logits at row `start`.

        positions: those that they are of, under context parallelism; by default from 0 on. Positions beyond the
        microbatch's own width stay as they are: they are padding to every reader.
        """
        assert isinstance(made, TensorLogits)
        (logits_bTW,) = made.leaves
        rows, width, _ = logits_bTW.shape
        self._sender.last[start : start + rows, :width].copy_(logits_bTW[..., : len(self._columns)])
        self._written.note(start, rows, positions)

    def handle(self) -> LogitsHandle:
        return LogitsHandle(self._sender.handle(), self._columns, self._written.all())

    @property
    def senders(self) -> tuple[Sender, ...]:
        return tuple(self._slots)

    def close(self) -> None:
        """Release the buffers; may be called again."""
        for sender in self.senders:
            sender.close()
