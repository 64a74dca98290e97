"""Handoff of each batch's hidden states, and once of the head: W / E times fewer bytes than logits (methods.md §9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_opd.handoff.base import Receiver, Sender
from nemo_opd.handoff.handle import Handle
from nemo_opd.handoff.plan import ONE_READER, Readers, within_vocabulary
from nemo_opd.handoff.region import BufferView
from nemo_opd.handoff.writer import NewSender, OutputWriter
from nemo_opd.logits.combined import SideBySideLogits
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import LogitRows, TensorLogits


@dataclass(frozen=True, slots=True)
class HeadHandle:
    """Reference to a rank's shard of the head."""

    weight: Handle
    """[columns, E]"""
    bias: Handle | None
    scale: float
    soft_cap: float | None

    def head(self, receiver: Receiver) -> Head:
        """Return the shard. Raises HandoffError if a buffer cannot be mapped."""
        bias = None if self.bias is None else receiver.constant(self.bias)
        return Head(receiver.constant(self.weight), bias, self.scale, self.soft_cap)

    def map(self, function: Callable[[Handle], Handle]) -> HeadHandle:
        """Apply a function to the handles."""
        bias = None if self.bias is None else function(self.bias)
        return replace(self, weight=function(self.weight), bias=bias)


@dataclass(frozen=True, slots=True)
class HiddenStatesHandle:
    """Reference to a teacher rank's final hidden states [tokens, E] of a batch, and to its head shard."""

    output: Handle
    head: HeadHandle | None
    """None if no student rank reads this rank's shard."""
    columns: range
    """The shard's columns of the tokenizer's vocabulary."""


@dataclass(frozen=True, slots=True)
class HiddenStatesWindow:
    """The hidden states [tokens, E] of a student rank's sequences, and the head."""

    hidden: BufferView
    head: tuple[HeadHandle, ...]
    """Shards with consecutive columns."""

    def rows(self, receiver: Receiver, sequences: slice, width: int, moved_by: Tensor | None = None) -> LogitRows:
        """Return the logits [b, width, W] of some sequences, computed when a loss reads them.

        moved_by: as for `Region.logits`. Hidden states are a view if they are in one buffer, else a concatenated copy.
        Shards of the head stay separate; their columns are read side by side. Raises HandoffError if a buffer cannot be
        mapped.
        """
        hidden = self.hidden.read(receiver, sequences).unsqueeze(0)
        heads = (shard.head(receiver) for shard in self.head)
        shards = [self.hidden.logits(HeadLogits(hidden, head), sequences, width, moved_by) for head in heads]
        return shards[0] if len(shards) == 1 else SideBySideLogits(shards)


class HiddenStatesWriter(OutputWriter):
    """Writer of a teacher rank's hidden states; the head has separate buffers."""

    def __init__(
        self,
        new_sender: NewSender,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        columns: range,
        readers: Readers = ONE_READER,
        num_slots: int = 1,
        is_fixed: bool = True,
    ) -> None:
        """Create the senders.

        columns: vocabulary range of this rank's head shard; rows beyond `vocab_size` are dropped, so a shard may become
        empty. dtype: dtype of the buffer and the head. num_slots: batches of hidden states stored at once.
        is_fixed: False if the head changes with each batch and is handed over each time.
        """
        super().__init__(new_sender, hidden_size, dtype, readers, num_slots)
        self._weight, self._bias = new_sender(readers.head), new_sender(readers.head)
        self._columns = within_vocabulary(columns, vocab_size)
        self._is_head_read = bool(readers.head) or readers.sends_head
        self._is_fixed = is_fixed
        self._head: HeadHandle | None = None

    def begin(self, num_tokens: int, slot: int = 0) -> None:
        super().begin(num_tokens, slot)
        if not self._is_fixed:
            self._head = None

    def write(self, start: int, output: TensorLogits | HeadLogits) -> None:
        """Write a microbatch's hidden states [1, n, E] to the tokens from `start` on; the first time also the head."""
        assert isinstance(output, HeadLogits)
        if self._head is None and self._is_head_read:
            self._write_head(output.head)
        self._put(start, output.hidden)

    def handle(self) -> HiddenStatesHandle:
        return HiddenStatesHandle(self._output.handle(), self._head, self._columns)

    @property
    def senders(self) -> tuple[Sender, ...]:
        return (*self._slots, self._weight, self._bias)

    def close(self) -> None:
        """Release the buffers; may be called again."""
        super().close()
        self._head = None

    def _write_head(self, head: Head) -> None:
        bias = None if head.bias is None else self._copy(head.bias, self._bias)
        self._head = HeadHandle(self._copy(head.weight, self._weight), bias, head.scale, head.soft_cap)

    def _copy(self, parameter: Tensor, sender: Sender) -> Handle:
        values = parameter.detach()[: len(self._columns)]
        sender.tensor(values.shape, self._dtype).copy_(values)
        return sender.handle()
