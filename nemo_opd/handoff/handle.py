"""References that the driver passes between processes instead of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from nemo_opd.errors import HandoffError


@dataclass(frozen=True, slots=True)
class Message:
    """Rows of a teacher rank's buffer, sent to a student rank on another node that cannot map the buffer."""

    sender: str
    """Identity of the sender that owns the buffer."""
    teacher_rank: int
    student_rank: int
    rows: range

    def payload(self, buffer: Tensor) -> Tensor:
        """Return the rows to send, a contiguous view."""
        return buffer[self.rows.start : self.rows.stop]


@dataclass(frozen=True, slots=True)
class Handle:
    """Reference to a sender's tensor."""

    sender: str
    """Identity of the sender."""
    allocation: int
    """Number of the sender's buffer; each new buffer must be mapped."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens: tuple[tuple[int, object], ...] = field(repr=False, compare=False)
    """(receiver, token) pairs. A token maps the buffer once, or is the message that carries the tensor."""
    version: int = 0
    """Number of tensors that the sender has written so far; copies of earlier versions are outdated."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def token(self, receiver: int) -> object:
        """Return a receiver's token. Raises HandoffError if the buffer was not exported to it."""
        for number, token in self.tokens:
            if number == receiver:
                return token
        numbers = [number for number, _ in self.tokens]
        raise HandoffError(
            f"a teacher's buffer was exported to student ranks {numbers}, but rank {receiver} reads it; create the "
            "sender with every rank that reads it"
        )

    def for_receiver(self, number: int) -> Handle:
        """Return a smaller handle with this receiver's token only. Raises HandoffError as `token` does."""
        return replace(self, tokens=((number, self.token(number)),))

    def sent_as(self, message: Message) -> Handle:
        """Return a handle for the message's receiver to the rows of the message."""
        return replace(self, shape=(len(message.rows), *self.shape[1:]), tokens=((message.student_rank, message),))
