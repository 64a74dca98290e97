"""Handoff of full-vocabulary logits: the reference mode (methods.md §9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.handoff.base import Receiver
from nemo_opd.handoff.handle import Handle
from nemo_opd.handoff.plan import ONE_READER, Readers, within_vocabulary
from nemo_opd.handoff.region import BufferView
from nemo_opd.handoff.writer import NewSender, OutputWriter
from nemo_opd.logits.combined import SideBySideLogits
from nemo_opd.logits.head import HeadLogits
from nemo_opd.logits.rows import LogitRows, TensorLogits


@dataclass(frozen=True, slots=True)
class LogitsHandle:
    """Reference to a teacher rank's logits of a batch: [tokens, columns]."""

    output: Handle
    columns: range
    """Columns of the tokenizer's vocabulary."""


@dataclass(frozen=True, slots=True)
class LogitsWindow:
    """The logits [tokens, W] of a student rank's sequences."""

    shards: tuple[BufferView, ...]
    """Consecutive columns of the vocabulary."""

    def rows(self, receiver: Receiver, sequences: slice, width: int, moved_by: Tensor | None = None) -> LogitRows:
        """Return the logits [b, width, W] of some sequences.

        moved_by: as for `Region.logits`. Rows in one buffer are a view, rows of several buffers a concatenated copy;
        column shards are read side by side without a copy. Raises HandoffError if a buffer cannot be mapped.
        """
        shards = [
            shard.logits(TensorLogits(shard.read(receiver, sequences).unsqueeze(0)), sequences, width, moved_by)
            for shard in self.shards
        ]
        return shards[0] if len(shards) == 1 else SideBySideLogits(shards)


class LogitsWriter(OutputWriter):
    """Writer of a teacher rank's logits."""

    def __init__(
        self,
        new_sender: NewSender,
        vocab_size: int,
        dtype: torch.dtype,
        *,
        columns: range,
        readers: Readers = ONE_READER,
        num_slots: int = 1,
    ) -> None:
        """Create the senders.

        columns: vocabulary range of this rank's logits; columns beyond `vocab_size` are dropped. dtype: dtype of the
        buffer. num_slots: batches stored at once.
        """
        self._columns = within_vocabulary(columns, vocab_size)
        super().__init__(new_sender, len(self._columns), dtype, readers, num_slots)

    def write(self, start: int, output: TensorLogits | HeadLogits) -> None:
        """Write a microbatch's logits [1, n, ·] to the tokens from `start` on."""
        assert isinstance(output, TensorLogits)
        (logits,) = output.leaves
        self._put(start, logits[..., : len(self._columns)])

    def handle(self) -> LogitsHandle:
        return LogitsHandle(self._output.handle(), self._columns)
