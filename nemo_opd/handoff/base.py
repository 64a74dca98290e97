"""The contract of a transport: a sender owns a buffer that persists across steps, a receiver maps it.

Ownership: the sender's `close` releases the memory, and a receiver closes before its sender. No transport leaves a name
on disk or in /dev/shm, so nothing outlives the processes, however they end.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

from nemo_opd.errors import HandoffError


@dataclass(frozen=True, slots=True)
class Handle:
    """What travels instead of a tensor."""

    sender: str
    """Identity of the sender."""
    allocation: int
    """Which of the sender's buffers; a new one is a new mapping."""
    token: object
    """What the transport needs to map the buffer."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Sender(ABC):
    """One buffer, reallocated only when a larger tensor is asked for."""

    def __init__(self) -> None:
        self.identity = uuid.uuid4().hex
        self.allocation = 0
        self._buffer: Tensor | None = None
        self._token: object = None
        self._shape: tuple[int, ...] = ()
        self._dtype = torch.uint8

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor in the buffer, to be written before `handle` is called.

        Overwrites what an earlier call returned: the receiver must be done with it.
        Raises HandoffError when the memory is not there.
        """
        num_bytes = prod(shape) * dtype.itemsize
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self.close()
            self.allocation += 1
            self._buffer, self._token = self._allocate(max(1, num_bytes))
        self._shape, self._dtype = tuple(shape), dtype
        return view(self._buffer, self._shape, dtype)

    def handle(self) -> Handle:
        """A handle to the last tensor; all that was written to it is visible to whoever maps it."""
        if self._buffer is None:
            raise HandoffError("handle() before tensor(): there is no buffer to hand over")
        self._flush()
        return Handle(self.identity, self.allocation, self._token, self._shape, self._dtype)

    def close(self) -> None:
        """Release the buffer; may be called again."""
        self._buffer = None
        if self._token is not None:
            self._release(self._token)
            self._token = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _allocate(self, num_bytes: int) -> tuple[Tensor, object]:
        """A flat uint8 tensor and the token by which a receiver maps it."""

    @abstractmethod
    def _release(self, token: object) -> None: ...

    @abstractmethod
    def _flush(self) -> None: ...


class Receiver(ABC):
    """Maps buffers, each once per allocation."""

    def __init__(self) -> None:
        self._mapped: dict[str, tuple[int, Tensor]] = {}

    def tensor(self, handle: Handle) -> Tensor:
        """The sender's tensor, not a copy; valid until the sender writes the next.

        Raises HandoffError when the sender is gone or the buffer is smaller than the handle says.
        """
        allocation, buffer = self._mapped.get(handle.sender, (0, None))
        if buffer is None or allocation != handle.allocation:
            self._mapped.pop(handle.sender, None)
            del buffer
            buffer = self._map(handle)
            self._mapped[handle.sender] = (handle.allocation, buffer)
        return view(buffer, handle.shape, handle.dtype)

    def close(self) -> None:
        """Drop every mapping; may be called again."""
        self._mapped.clear()
        self._collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _map(self, handle: Handle) -> Tensor:
        """The whole buffer as a flat uint8 tensor."""

    @abstractmethod
    def _collect(self) -> None: ...


def view(buffer: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The first bytes of a flat uint8 tensor as a tensor of `shape` and `dtype`."""
    return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(*shape)
