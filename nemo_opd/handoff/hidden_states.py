"""Final hidden states for every batch, and the head once: W / E times less than logits (METHODS §9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.errors import HandoffError
from nemo_opd.handoff.base import Handle, Receiver, Sender
from nemo_opd.handoff.parcel import Parcel
from nemo_opd.handoff.plan import ONE_READER, Readers
from nemo_opd.handoff.region import Region
from nemo_opd.handoff.shards import within_vocabulary
from nemo_opd.handoff.written import Written, WrittenRows
from nemo_opd.logits.combined import SideBySideLogits
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import LogitRows, TensorLogits


@dataclass(frozen=True, slots=True)
class HeadHandle:
    """To a rank's shard of the head."""

    weight: Handle
    """[its columns, E]"""
    bias: Handle | None
    scale: float
    soft_cap: float | None

    def head(self, receiver: Receiver) -> Head:
        """Raises HandoffError for a buffer that cannot be mapped."""
        bias = None if self.bias is None else receiver.constant(self.bias)
        return Head(receiver.constant(self.weight), bias, self.scale, self.soft_cap)

    def for_receiver(self, number: int) -> HeadHandle:
        """Raises HandoffError for one that it was not exported to."""
        return self._through(lambda handle: handle.for_receiver(number))

    def sent_to(self, number: int, teacher_rank: int) -> HeadHandle:
        """To what a receiver on another node has of it, once it was sent."""
        return self._through(lambda handle: handle.sent_to(number, Parcel(handle.sender, teacher_rank)))

    def _through(self, change: Callable[[Handle], Handle]) -> HeadHandle:
        bias = None if self.bias is None else change(self.bias)
        return HeadHandle(change(self.weight), bias, self.scale, self.soft_cap)


@dataclass(frozen=True, slots=True)
class HiddenStatesHandle:
    """To the final hidden states [b, its positions, E] that a teacher's rank has of a batch, and to its head shard."""

    hidden: Handle
    head: HeadHandle | None
    """None where nobody reads this rank's."""
    columns: range
    """Of the tokenizer's vocabulary, that the shard is of."""
    written: tuple[Written, ...]

    def rows(self, receiver: Receiver, texts: slice, width: int) -> LogitRows:
        """Of buffers that are a window as they are: see `HiddenStatesWindow.rows`."""
        window = HiddenStatesWindow(Region.whole(self.hidden), (self.head_for(receiver.number),))
        return window.rows(receiver, texts, width)

    def head_for(self, receiver: int, sent_by: int | None = None) -> HeadHandle:
        """As exported to one receiver, or as sent by a rank on another node. Raises HandoffError where it was not."""
        if self.head is None:
            raise HandoffError(
                f"a teacher's rank was made without readers of its head, and student rank {receiver} is to read it; "
                "the writer must be given every rank that reads it when it is made"
            )
        return self.head.for_receiver(receiver) if sent_by is None else self.head.sent_to(receiver, sent_by)


@dataclass(frozen=True, slots=True)
class HiddenStatesWindow:
    """The hidden states [B, T, E] of a student rank's rows, and the head, wherever they are."""

    hidden: Region
    head: tuple[HeadHandle, ...]
    """Shards, one after another in columns."""

    def rows(self, receiver: Receiver, texts: slice, width: int) -> LogitRows:
        """Of some texts, up to `width` positions: logits that are made when a loss reads them.

        Hidden states are a view where one buffer has them, else copied together; shards of the head stay apart and
        their columns are read side by side. Raises HandoffError for a buffer that cannot be mapped.
        """
        hidden = self.hidden.read(receiver, texts, width)
        shards = [HeadLogits(hidden, shard.head(receiver)) for shard in self.head]
        return shards[0] if len(shards) == 1 else SideBySideLogits(shards)


class HiddenStatesWriter:
    """Collects the hidden states of a batch, microbatch by microbatch, in a buffer; the head has buffers of its own."""

    def __init__(
        self,
        new_sender: Callable[[Sequence[int]], Sender],
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        columns: range | None = None,
        readers: Readers = ONE_READER,
        num_slots: int = 1,
    ) -> None:
        """columns: of the vocabulary, that this rank's shard of the head is of; by default all. Rows of the head beyond
        `vocab_size` are left out, so a shard may become empty. dtype: of the buffer, and of the head. readers: who will
        map them. num_slots: batches whose hidden states are kept at once.
        """
        self._slots = [new_sender(readers.output) for _ in range(num_slots)]
        self._hidden = self._slots[0]
        self._weight, self._bias = new_sender(readers.head), new_sender(readers.head)
        self._columns = within_vocabulary(columns, vocab_size)
        self._hidden_size, self._dtype = hidden_size, dtype
        self._is_head_read = bool(readers.head) or readers.sends_head
        self._head: HeadHandle | None = None

    def begin(self, num_texts: int, width: int, slot: int = 0) -> None:
        """width: positions of this rank, the most that a microbatch has. slot: whose batch is overwritten."""
        self._hidden = self._slots[slot]
        self._hidden.tensor((num_texts, width, self._hidden_size), self._dtype)
        self._written = WrittenRows(num_texts, width)

    def write(self, start: int, made: TensorLogits | HeadLogits, positions: Sequence[range] | None = None) -> None:
        """Put a microbatch's hidden states at row `start`.

        positions: those that they are of, under context parallelism; by default from 0 on. Positions beyond the
        microbatch's own width stay as they are: they are padding to every reader.
        """
        assert isinstance(made, HeadLogits)
        if self._head is None and self._is_head_read:
            self._hand_over(made.head)
        rows, width, _ = made.hidden.shape
        self._hidden.last[start : start + rows, :width].copy_(made.hidden)
        self._written.note(start, rows, positions)

    def handle(self) -> HiddenStatesHandle:
        return HiddenStatesHandle(self._hidden.handle(), self._head, self._columns, self._written.all())

    @property
    def senders(self) -> tuple[Sender, ...]:
        return (*self._slots, self._weight, self._bias)

    def close(self) -> None:
        """Release the buffers; may be called again."""
        for sender in self.senders:
            sender.close()
        self._head = None

    def _hand_over(self, head: Head) -> None:
        bias = None if head.bias is None else self._copied(head.bias, self._bias)
        self._head = HeadHandle(self._copied(head.weight, self._weight), bias, head.scale, head.soft_cap)

    def _copied(self, parameter: Tensor, sender: Sender) -> Handle:
        own = parameter.detach()[: len(self._columns)]
        sender.tensor(own.shape, self._dtype).copy_(own)
        return sender.handle()
