"""The contract of a transport: a sender owns a buffer that persists across steps, receivers map it.

Receivers are identified by number, the student's rank: a sender knows from the start who will map its buffer.
Ownership: the sender's `close` releases the memory, and a receiver closes before its sender. A buffer has no name on
disk or in /dev/shm, so none outlives the processes, however they end.
"""

from __future__ import annotations

import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

from nemo_opd.errors import HandoffError
from nemo_opd.handoff.handle import Handle, Message

_senders: weakref.WeakValueDictionary[str, Sender] = weakref.WeakValueDictionary()
"""Senders of this process by identity."""


@dataclass(frozen=True, slots=True)
class _SameProcess:
    """Token of a receiver in the sender's process, which reads the buffer directly."""


class Sender(ABC):
    """One buffer, reallocated only when a larger tensor is needed."""

    def __init__(self, receivers: Sequence[int] = (0,), own: int | None = None) -> None:
        """Store who will map the buffer, each once for every allocation.

        receivers: numbers of the receivers, possibly none. own: the receiver in this process, which does not map it.
        """
        self.identity = uuid.uuid4().hex
        _senders[self.identity] = self
        self.allocation = self.version = 0
        self.receivers = tuple(number for number in receivers if number != own)
        """Receivers in other processes."""
        self._own = tuple((number, _SameProcess()) for number in receivers if number == own)
        self._buffer: Tensor | None = None
        self._tokens: tuple[object, ...] = ()
        self._shape: tuple[int, ...] = ()
        self._dtype = torch.uint8

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in the buffer, to be written before `handle` is called.

        Overwrites what an earlier call returned: every receiver must be done with it.
        Raises HandoffError where there is not enough memory.
        """
        num_bytes = prod(shape) * dtype.itemsize
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self.close()
            self.allocation += 1
            self._buffer, self._tokens = self._allocate(max(1, num_bytes))
        self.version += 1
        self._shape, self._dtype = tuple(shape), dtype
        return self.last

    @property
    def last(self) -> Tensor:
        """The tensor that `tensor` last returned; a reference to it keeps the memory."""
        assert self._buffer is not None
        return _view(self._buffer, self._shape, self._dtype)

    def handle(self) -> Handle:
        """Return a handle to the last tensor, once all that was written to it is visible to receivers.

        Raises HandoffError before the first call of `tensor`.
        """
        if self._buffer is None:
            raise HandoffError("handle() before tensor(): there is no buffer to hand over")
        self._flush()
        tokens = (*self._own, *zip(self.receivers, self._tokens, strict=True))
        return Handle(self.identity, self.allocation, self._shape, self._dtype, tokens, self.version)

    def close(self) -> None:
        """Release the buffer; may be called again."""
        if self._buffer is not None:
            self._buffer, self._tokens = None, ()
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _allocate(self, num_bytes: int) -> tuple[Tensor, tuple[object, ...]]:
        """Return a flat uint8 tensor and, for each receiver, the token by which it maps the tensor."""

    @abstractmethod
    def _release(self) -> None:
        """Free the memory of the buffer, which is already dropped."""

    @abstractmethod
    def _flush(self) -> None:
        """Wait until all writes to the buffer are visible to other processes."""


class Receiver(ABC):
    """Mapped buffers, each mapped once per allocation, and the memory for messages from other nodes."""

    def __init__(self, number: int = 0) -> None:
        """Take the number by which senders identify this receiver."""
        self.number = number
        self.copied_bytes = 0
        """Bytes copied out of mapped buffers by whoever reads them through this receiver; views count as none."""
        self._mapped: dict[str, tuple[int, Tensor]] = {}
        self._copies: dict[str, tuple[int, Tensor]] = {}
        self._received: dict[str, Tensor] = {}

    def receive_buffer(self, handle: Handle, device: str) -> Tensor:
        """Return contiguous, uninitialised memory for a message, where `tensor` finds it.

        It persists across steps and is overwritten, as a sender's buffer is.
        """
        buffer = self._received.get(handle.sender)
        if buffer is None or buffer.numel() < handle.num_bytes:
            del buffer
            self._received.pop(handle.sender, None)
            buffer = torch.empty(max(1, handle.num_bytes), dtype=torch.uint8, device=device)
            self._received[handle.sender] = buffer
        return _view(buffer, handle.shape, handle.dtype)

    def tensor(self, handle: Handle) -> Tensor:
        """Return the sender's tensor, not a copy; valid until the sender writes the next.

        `near` makes of it, or of its rows, what this process' device can compute with. Raises HandoffError where the
        sender is gone, the buffer is smaller than the handle says, or it was not exported or sent to this receiver.
        """
        token = handle.token(self.number)
        if isinstance(token, Message):
            return self._from_message(handle)
        if isinstance(token, _SameProcess):
            return _senders[handle.sender].last
        allocation, buffer = self._mapped.get(handle.sender, (0, None))
        if buffer is None or allocation != handle.allocation:
            self._mapped.pop(handle.sender, None)
            del buffer
            buffer = self._map(handle)
            self._mapped[handle.sender] = (handle.allocation, buffer)
        return _view(buffer, handle.shape, handle.dtype)

    def constant(self, handle: Handle) -> Tensor:
        """Return the sender's tensor for many reads.

        This is the mapping itself or, for a buffer on another device, a copy on this one that is kept until the sender
        writes the next. Raises HandoffError as `tensor` does.
        """
        mapped = self.tensor(handle)
        if self._is_near(handle):
            return mapped
        version, copy = self._copies.get(handle.sender, (0, None))
        if copy is None or version != handle.version:
            self._copies.pop(handle.sender, None)
            copy = self.near(mapped)
            if copy is mapped:
                copy = mapped.clone()
                self.copied_bytes += handle.num_bytes
            self._copies[handle.sender] = (handle.version, copy)
        return copy

    def near(self, tensor: Tensor) -> Tensor:
        """Return what `tensor` returned, or rows of it, where this process' device can compute with it.

        This is the tensor itself where the device reads the buffer, else a copy.
        """
        return tensor

    def _from_message(self, handle: Handle) -> Tensor:
        if handle.sender not in self._received:
            raise HandoffError(
                f"student rank {self.number} is to read a teacher's buffer on another node before it was sent; send "
                "what windows need (ExchangePlanner) before they are read"
            )
        return _view(self._received[handle.sender], handle.shape, handle.dtype)

    def close(self) -> None:
        """Drop every mapping and every message; may be called again."""
        self._mapped.clear()
        self._copies.clear()
        self._received.clear()
        self._collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _map(self, handle: Handle) -> Tensor:
        """Return the whole buffer as a flat uint8 tensor."""

    @abstractmethod
    def _is_near(self, handle: Handle) -> bool:
        """Return whether `tensor` is as fast to read as this process' own memory, which messages are."""

    @abstractmethod
    def _collect(self) -> None:
        """Free what dropped mappings leave."""


def _view(buffer: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the first bytes of a flat uint8 tensor as a tensor of `shape` and `dtype`."""
    return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(*shape)
