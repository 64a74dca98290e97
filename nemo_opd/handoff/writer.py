"""The base of the writers that fill a teacher rank's output buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_opd.handoff.base import Sender
from nemo_opd.handoff.plan import Readers

NewSender = Callable[[Sequence[int]], Sender]
"""Function that creates a sender for the receivers with these numbers."""


class OutputWriter:
    """Output buffers [tokens, columns], one per batch in flight, filled microbatch by microbatch."""

    def __init__(
        self, new_sender: NewSender, num_columns: int, dtype: torch.dtype, readers: Readers, num_slots: int
    ) -> None:
        self._slots = [new_sender(readers.output) for _ in range(num_slots)]
        self._output = self._slots[0]
        """The slot that is being written."""
        self._num_columns, self._dtype = num_columns, dtype

    def begin(self, num_tokens: int, slot: int = 0) -> None:
        """Start a batch, which overwrites the slot's previous batch."""
        self._output = self._slots[slot]
        self._output.tensor((num_tokens, self._num_columns), self._dtype)

    def _put(self, start: int, output: Tensor) -> None:
        """Start copying a microbatch's output [1, n, columns] to the rows from `start` on; `handle` waits for it."""
        self._output.last[start : start + output.shape[1]].copy_(output.squeeze(0), non_blocking=True)

    @property
    def senders(self) -> tuple[Sender, ...]:
        return tuple(self._slots)

    def close(self) -> None:
        """Release the buffers; may be called again."""
        for sender in self.senders:
            sender.close()
