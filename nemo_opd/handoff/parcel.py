"""What is sent to a student's rank on another node, which cannot map a teacher's buffer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nemo_opd.handoff.plan import Box


@dataclass(frozen=True, slots=True)
class Parcel:
    """Cells of a teacher rank's buffer. In a handle it stands in the place of what a buffer is mapped by."""

    sender: str
    """Identity of the sender whose buffer it is."""
    rank: int
    """The teacher's."""
    box: Box | None = None
    """Of the buffer [rows, positions, columns]; None: all of it, whatever its shape."""

    def cells(self, buffer: Tensor) -> Tensor:
        """As they are sent: contiguous, copied only where they are not."""
        return (buffer if self.box is None else buffer[self.box.slices]).contiguous()
