"""References that the driver passes between processes instead of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from nemo_opd.errors import HandoffError


@dataclass(frozen=True, slots=True)
class Message:
    """Rows of a teacher rank's buffer that are sent to a student rank on another node, which cannot map the buffer."""

    sender: str
    """Identity of the sender that owns the buffer."""
    teacher_rank: int
    student_rank: int
    rows: range

    def payload(self, buffer: Tensor) -> Tensor:
        """Return the rows as they are sent: contiguous, not copied."""
        return buffer[self.rows.start : self.rows.stop]


@dataclass(frozen=True, slots=True)
class Handle:
    """Reference to a sender's tensor."""

    sender: str
    """Identity of the sender."""
    allocation: int
    """Number of the sender's buffer; a new one has to be mapped again."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens: tuple[tuple[int, object], ...] = field(repr=False, compare=False)
    """Receivers and their tokens, each of which maps the buffer once; or the message that has the tensor."""
    version: int = 0
    """Number of tensors that the sender has put into its buffers; a copy of an earlier one is outdated."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def token(self, receiver: int) -> object:
        """Return a receiver's token. Raises HandoffError for one that the buffer was not exported to."""
        for number, token in self.tokens:
            if number == receiver:
                return token
        numbers = [number for number, _ in self.tokens]
        raise HandoffError(
            f"a teacher's buffer was exported to student ranks {numbers}, not to {receiver}, which is to read it; give "
            "the sender every rank that reads it when it is made"
        )

    def for_receiver(self, number: int) -> Handle:
        """Return the handle with this receiver's token alone, so that it stays small. Raises HandoffError."""
        return replace(self, tokens=((number, self.token(number)),))

    def sent_as(self, message: Message) -> Handle:
        """Return the handle to the rows of a message, for its receiver."""
        return replace(self, shape=(len(message.rows), *self.shape[1:]), tokens=((message.student_rank, message),))
