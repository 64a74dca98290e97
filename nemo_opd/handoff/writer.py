"""Buffers of a teacher rank's output, for its writers of logits and of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_opd.handoff.base import Sender
from nemo_opd.handoff.plan import Readers

NewSender = Callable[[Sequence[int]], Sender]
"""Makes a sender for the receivers of these numbers."""


class OutputWriter:
    """Buffers [tokens, columns] for the output of batches, each filled microbatch by microbatch."""

    def __init__(
        self, new_sender: NewSender, num_columns: int, dtype: torch.dtype, readers: Readers, num_slots: int
    ) -> None:
        self._slots = [new_sender(readers.output) for _ in range(num_slots)]
        self._output = self._slots[0]
        """Slot of the batch that is written."""
        self._num_columns, self._dtype = num_columns, dtype

    def begin(self, num_tokens: int, slot: int = 0) -> None:
        """Start a batch, which overwrites the slot's last."""
        self._output = self._slots[slot]
        self._output.tensor((num_tokens, self._num_columns), self._dtype)

    def _put(self, start: int, output: Tensor) -> None:
        """Start to copy a microbatch's output [1, n, columns] to the rows from `start` on; `handle` waits for it."""
        self._output.last[start : start + output.shape[1]].copy_(output.squeeze(0), non_blocking=True)

    @property
    def senders(self) -> tuple[Sender, ...]:
        return tuple(self._slots)

    def close(self) -> None:
        """Release the buffers; may be called again."""
        for sender in self.senders:
            sender.close()
