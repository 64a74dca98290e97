"""The transport interface: a sender owns a buffer that persists across steps; receivers map it.

A receiver's number is its student rank, so a sender knows from the start who will map its buffer. The sender's `close`
releases the memory; receivers close first. Buffers have no name on disk or in /dev/shm, so they never outlive their
processes.
"""

from __future__ import annotations

import uuid
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from nemo_opd.types import Closing


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
        """Return a receiver's token. Raises KeyError if the buffer was not exported to it."""
        return dict(self.tokens)[receiver]

    def for_receiver(self, number: int) -> Handle:
        """Return a smaller handle with this receiver's token only. Raises KeyError as `token` does."""
        return replace(self, tokens=((number, self.token(number)),))

    def sent_as(self, message: Message) -> Handle:
        """Return a handle for the message's receiver to the rows of the message."""
        return replace(self, shape=(len(message.rows), *self.shape[1:]), tokens=((message.student_rank, message),))


_senders: weakref.WeakValueDictionary[str, Sender] = weakref.WeakValueDictionary()
"""Senders of this process, keyed by identity."""


@dataclass(frozen=True, slots=True)
class _SameProcess:
    """Token for a receiver in the sender's process, which reads the buffer directly."""


class Sender(Closing):
    """One buffer, reallocated only when a larger tensor is needed."""

    def __init__(self, receivers: Sequence[int] = (0,), own: int | None = None) -> None:
        """Register the receivers; each maps every allocation once.

        receivers: their numbers, possibly none. own: the receiver in this process, which needs no mapping.
        """
        self.identity = uuid.uuid4().hex
        _senders[self.identity] = self
        self.allocation = self.version = 0
        self.receivers = tuple(number for number in receivers if number != own)
        """Receivers in other processes."""
        self._local_tokens = tuple((number, _SameProcess()) for number in receivers if number == own)
        self._buffer: Tensor | None = None
        self._tokens: tuple[object, ...] = ()
        self._shape: tuple[int, ...] = ()
        self._dtype = torch.uint8

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in the buffer, to be written before `handle` is called.

        Overwrites the previous tensor, so every receiver must be done with it.
        Raises HandoffError if memory runs out.
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
        """The tensor that `tensor` last returned; a reference to it keeps the memory alive."""
        assert self._buffer is not None
        return _view(self._buffer, self._shape, self._dtype)

    def handle(self) -> Handle:
        """Return a handle to the last tensor, after making all writes visible to receivers."""
        assert self._buffer is not None, "`tensor` is called first"
        self._flush()
        tokens = (*self._local_tokens, *zip(self.receivers, self._tokens, strict=True))
        return Handle(self.identity, self.allocation, self._shape, self._dtype, tokens, self.version)

    def close(self) -> None:
        """Release the buffer; may be called again."""
        if self._buffer is not None:
            self._buffer, self._tokens = None, ()
            self._release()

    @abstractmethod
    def _allocate(self, num_bytes: int) -> tuple[Tensor, tuple[object, ...]]:
        """Return a flat uint8 tensor, and for each receiver the token that it maps the tensor with."""

    @abstractmethod
    def _release(self) -> None:
        """Free the memory of the buffer, which is already dropped."""

    @abstractmethod
    def _flush(self) -> None:
        """Wait until all writes to the buffer are visible to other processes."""


class Receiver(Closing):
    """Mapped buffers, each mapped once per allocation, and memory for messages from other nodes."""

    def __init__(self, number: int = 0) -> None:
        """Store the number by which senders identify this receiver."""
        self.number = number
        self.copied_bytes = 0
        """Bytes that readers copied out of buffers mapped by this receiver; views do not count."""
        self._mapped: dict[str, tuple[int, Tensor]] = {}
        self._copies: dict[str, tuple[int, Tensor]] = {}
        self._received: dict[str, Tensor] = {}

    def receive_buffer(self, handle: Handle, device: str) -> Tensor:
        """Return contiguous, uninitialised memory for a message, which `tensor` then reads.

        Like a sender's buffer, it persists across steps and is overwritten.
        """
        buffer = self._received.get(handle.sender)
        if buffer is None or buffer.numel() < handle.num_bytes:
            del buffer
            self._received.pop(handle.sender, None)
            buffer = torch.empty(max(1, handle.num_bytes), dtype=torch.uint8, device=device)
            self._received[handle.sender] = buffer
        return _view(buffer, handle.shape, handle.dtype)

    def tensor(self, handle: Handle) -> Tensor:
        """Return the sender's tensor without a copy; valid until the sender writes the next one.

        Pass it, or rows of it, to `near` before computing with it. Raises HandoffError if the sender is gone or the
        buffer is smaller than the handle says, and KeyError if it was not exported or sent to this receiver.
        """
        token = handle.token(self.number)
        if isinstance(token, Message):
            return _view(self._received[handle.sender], handle.shape, handle.dtype)
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
        """Return the sender's tensor for many reads: the mapping, or a copy if the buffer is on another device.

        The copy is kept until the sender writes the next tensor. Raises HandoffError as `tensor` does.
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
        """Make a mapped tensor, or rows of one, readable for this process's device, by a copy if necessary."""
        return tensor

    def close(self) -> None:
        """Drop every mapping and every message; may be called again."""
        self._mapped.clear()
        self._copies.clear()
        self._received.clear()
        self._collect()

    @abstractmethod
    def _map(self, handle: Handle) -> Tensor:
        """Map the buffer as a flat uint8 tensor."""

    @abstractmethod
    def _is_near(self, handle: Handle) -> bool:
        """Return whether `tensor` can be read as fast as this process's memory, as messages can."""

    @abstractmethod
    def _collect(self) -> None:
        """Free the resources of dropped mappings."""


def _view(buffer: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the first bytes of a flat uint8 tensor as a tensor of `shape` and `dtype`."""
    return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(*shape)
