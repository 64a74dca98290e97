"""A tensor whose rows are in the buffers of one or more teacher ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import together
from nemo_opd.handoff.base import Receiver
from nemo_opd.handoff.handle import Handle
from nemo_opd.handoff.plan import overlap
from nemo_opd.logits.packed import PackedLogits, places_in_row, token_bounds
from nemo_opd.logits.rows import TrainableRows


@dataclass(frozen=True, slots=True)
class RegionPart:
    """Rows of a region, and the buffer that has them, with all columns of the buffer."""

    handle: Handle
    first_row: int
    """First of the rows in the buffer."""
    rows: range
    """Rows of the region."""


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor [tokens, columns] of sequences one after another, of which each part has all columns."""

    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    parts: tuple[RegionPart, ...]

    def read(self, receiver: Receiver, sequences: slice) -> Tensor:
        """Return the tokens of some sequences: [n, columns].

        This is a view where one buffer has all of them and the device reads it, else a copy. Raises HandoffError for a
        buffer that cannot be mapped.
        """
        # Map every buffer, needed now or not: each export is a reference that only its receiver can give back.
        mapped = [receiver.tensor(part.handle) for part in self.parts]
        start, stop, _ = sequences.indices(len(self.lengths))
        bounds = token_bounds(self.lengths)
        wanted = range(bounds[start], bounds[stop])
        found: list[Tensor] = []
        for part, buffer in zip(self.parts, mapped, strict=True):
            if shared := overlap(part.rows, wanted):
                begin = part.first_row + shared.start - part.rows.start
                found.append(receiver.near(buffer[begin : begin + len(shared)]))
        if len(found) == 1:
            return found[0]
        receiver.copied_bytes += sum(source.nbytes for source in found)
        return torch.cat(found)

    def logits(
        self, tokens: TrainableRows, sequences: slice, width: int, moved_by: Tensor | None = None
    ) -> PackedLogits:
        """Return logits [b, width, X] from those of the tokens of some sequences [1, n, X].

        moved_by: of each sequence, int64 [b] on the host: position i has the logits of its token i + moved_by.
        """
        (places,) = together([places_in_row(self.lengths[sequences], width, moved_by)], tokens.device)
        return PackedLogits(tokens, places)
