"""Handoff of each position's likeliest tokens, encoded as bytes (methods.md §9.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import to_device_batched
from nemo_opd.handoff.base import Receiver
from nemo_opd.handoff.handle import Handle
from nemo_opd.handoff.plan import ONE_READER, Readers
from nemo_opd.handoff.region import BufferView
from nemo_opd.handoff.writer import NewSender, OutputWriter
from nemo_opd.logits.packed import places_in_row
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.sparse import SparseLayout, SparseLogits


@dataclass(frozen=True, slots=True)
class SparseHandle:
    """Reference to a teacher rank's rows of a batch: uint8 [tokens, bytes]."""

    output: Handle
    layout: SparseLayout

    @property
    def columns(self) -> range:
        """Columns of the buffer."""
        return range(self.layout.handed_bytes)


@dataclass(frozen=True, slots=True)
class SparseWindow:
    """Encoded rows for a student rank's sequences."""

    shards: tuple[BufferView, ...]
    """One region, because rows are not split over teacher ranks."""
    layout: SparseLayout

    def rows(self, receiver: Receiver, sequences: slice, width: int, moved_by: Tensor | None = None) -> LogitRows:
        """Return the logits [b, width, W] of some sequences.

        moved_by: as for `Region.logits`. Raises HandoffError if a buffer cannot be mapped.
        """
        (region,) = self.shards
        rows = region.read(receiver, sequences)
        (places,) = to_device_batched([places_in_row(region.lengths[sequences], width, moved_by)], rows.device)
        return SparseLogits(rows, self.layout, places)


class SparseWriter(OutputWriter):
    """Writer of a teacher rank's encoded rows."""

    def __init__(
        self, new_sender: NewSender, layout: SparseLayout, *, readers: Readers = ONE_READER, num_slots: int = 1
    ) -> None:
        super().__init__(new_sender, layout.handed_bytes, torch.uint8, readers, num_slots)
        self._layout = layout

    def write(self, start: int, output: SparseLogits) -> None:
        """Write a microbatch's rows to the tokens from `start` on."""
        self._put(start, output.rows.unsqueeze(0))

    def handle(self) -> SparseHandle:
        return SparseHandle(self._output.handle(), self._layout)
