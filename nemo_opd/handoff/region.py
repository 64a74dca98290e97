"""A tensor whose rows are in the buffers of one or more teacher ranks, and the base of these buffers' writers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import to_device_batched
from nemo_opd.handoff.base import Handle, Receiver, Sender
from nemo_opd.handoff.plan import Readers, overlap
from nemo_opd.logits.rows import TrainableRows
from nemo_opd.logits.sources import PackedLogits, places_in_row, token_bounds


@dataclass(frozen=True, slots=True)
class RegionPart:
    """Rows of a region, and the buffer that holds them."""

    handle: Handle
    first_row: int
    """First row of the part in the buffer."""
    rows: range
    """Rows of the region."""


@dataclass(frozen=True, slots=True)
class BufferView:
    """A tensor [tokens, columns] of consecutive sequences, split by rows into parts."""

    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    parts: tuple[RegionPart, ...]

    def read(self, receiver: Receiver, sequences: slice) -> Tensor:
        """Return the tokens of some sequences: [n, columns].

        The result is a view if one buffer holds all of them and the device can read it, else a copy. Raises
        HandoffError if a buffer cannot be mapped.
        """
        # Map every buffer, needed now or not: each export is a reference that only its receiver can release.
        mapped = [receiver.tensor(part.handle) for part in self.parts]
        start, stop, _ = sequences.indices(len(self.lengths))
        bounds = token_bounds(self.lengths)
        requested = range(bounds[start], bounds[stop])
        sources: list[Tensor] = []
        for part, buffer in zip(self.parts, mapped, strict=True):
            if shared := overlap(part.rows, requested):
                begin = part.first_row + shared.start - part.rows.start
                sources.append(receiver.near(buffer[begin : begin + len(shared)]))
        if len(sources) == 1:
            return sources[0]
        receiver.copied_bytes += sum(source.nbytes for source in sources)
        return torch.cat(sources)

    def logits(
        self, tokens: TrainableRows, sequences: slice, width: int, moved_by: Tensor | None = None
    ) -> PackedLogits:
        """Arrange packed logits [1, n, X] of some sequences as [b, width, X].

        moved_by: int64 [b] on the host; position i of a sequence gets the logits of its token i + moved_by.
        """
        (places,) = to_device_batched([places_in_row(self.lengths[sequences], width, moved_by)], tokens.device)
        return PackedLogits(tokens, places)


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
