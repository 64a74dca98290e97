"""The contract of a transport: a sender owns a buffer that persists across steps, receivers map it.

Receivers are told apart by number, the student's rank: a sender knows from the start who will map its buffer.
Ownership: the sender's `close` releases the memory, and a receiver closes before its sender. A buffer has no name on
disk or in /dev/shm, so none outlives the processes, however they end.
"""

from __future__ import annotations

import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from nemo_opd.errors import HandoffError
from nemo_opd.handoff.parcel import Parcel

_senders: weakref.WeakValueDictionary[str, Sender] = weakref.WeakValueDictionary()
"""Those of this process, by identity."""


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """The token of a receiver in the sender's process, which reads the buffer itself."""


@dataclass(frozen=True, slots=True)
class Handle:
    """What travels instead of a tensor."""

    sender: str
    """Identity of the sender."""
    allocation: int
    """Which of the sender's buffers; a new one is a new mapping."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens: tuple[tuple[int, object], ...] = field(repr=False, compare=False)
    """By receiver: what the transport needs to map the buffer, good for one mapping."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def token(self, receiver: int) -> object:
        """Raises HandoffError for a receiver that the sender has not been told of."""
        for number, token in self.tokens:
            if number == receiver:
                return token
        numbers = [number for number, _ in self.tokens]
        raise HandoffError(
            f"a teacher's buffer was exported to student ranks {numbers}, not to {receiver}, which is to read it; the "
            "sender must be given every rank that reads it when it is made"
        )

    def for_receiver(self, number: int) -> Handle:
        """The same without the tokens of others, so that it stays small on its way. Raises HandoffError."""
        return replace(self, tokens=((number, self.token(number)),))

    def sent_to(self, number: int, parcel: Parcel, place: int = 0) -> Handle:
        """To what a receiver on another node has of it, once it was sent.

        place: among the parcels of this buffer to this receiver, which has memory for each.
        """
        box = parcel.box
        shape = self.shape if box is None else (len(box.rows), len(box.positions), len(box.columns))
        return Handle(f"{self.sender}/{place}", self.allocation, shape, self.dtype, ((number, parcel),))


class Sender(ABC):
    """One buffer, reallocated only when a larger tensor is asked for."""

    def __init__(self, receivers: Sequence[int] = (0,), own: int | None = None) -> None:
        """receivers: the numbers of those that read the buffer; maybe none. own: the one among them that is in this
        process. The others map it, each once for every allocation.
        """
        self.identity = uuid.uuid4().hex
        _senders[self.identity] = self
        self.allocation = 0
        self.receivers = tuple(number for number in receivers if number != own)
        """Those in other processes."""
        self._own = tuple((number, OwnMemory()) for number in receivers if number == own)
        self._buffer: Tensor | None = None
        self._tokens: tuple[object, ...] = ()
        self._shape: tuple[int, ...] = ()
        self._dtype = torch.uint8

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor in the buffer, to be written before `handle` is called.

        Overwrites what an earlier call returned: every receiver must be done with it.
        Raises HandoffError when the memory is not there.
        """
        num_bytes = prod(shape) * dtype.itemsize
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self.close()
            self.allocation += 1
            self._buffer, self._tokens = self._allocate(max(1, num_bytes))
        self._shape, self._dtype = tuple(shape), dtype
        return view(self._buffer, self._shape, dtype)

    @property
    def last(self) -> Tensor:
        """What `tensor` returned, which must have been called. Whoever keeps it keeps the memory."""
        assert self._buffer is not None
        return view(self._buffer, self._shape, self._dtype)

    def handle(self) -> Handle:
        """A handle to the last tensor; all that was written to it is visible to whoever maps it.

        Raises HandoffError where there is none.
        """
        if self._buffer is None:
            raise HandoffError("handle() before tensor(): there is no buffer to hand over")
        self._flush()
        tokens = (*self._own, *zip(self.receivers, self._tokens, strict=True))
        return Handle(self.identity, self.allocation, self._shape, self._dtype, tokens)

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
        """A flat uint8 tensor and, for each receiver, the token by which it maps it."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what the buffer, already dropped, was in."""

    @abstractmethod
    def _flush(self) -> None: ...


class Receiver(ABC):
    """Maps buffers, each once per allocation."""

    def __init__(self, number: int = 0) -> None:
        """number: which of its senders' receivers it is."""
        self.number = number
        self.copied_bytes = 0
        """Out of mapped buffers, by whoever reads them through this receiver; reading a view of them copies none."""
        self._mapped: dict[str, tuple[int, Tensor]] = {}
        self._copies: dict[str, tuple[int, Tensor]] = {}
        self._rooms: dict[str, Tensor] = {}

    def room(self, handle: Handle, device: str) -> Tensor:
        """Memory of this process for what is sent to it, contiguous and uninitialised, where `tensor` then finds it.

        It persists across steps like a sender's buffer, and is overwritten in the same way.
        """
        room = self._rooms.get(handle.sender)
        if room is None or room.numel() < handle.num_bytes:
            self._rooms.pop(handle.sender, None)
            room = self._rooms[handle.sender] = torch.empty(max(1, handle.num_bytes), dtype=torch.uint8, device=device)
        return view(room, handle.shape, handle.dtype)

    def tensor(self, handle: Handle) -> Tensor:
        """The sender's tensor, not a copy; valid until the sender writes the next.

        It can be computed with on this process' device, wherever the buffer is. Raises HandoffError when the sender is
        gone, the buffer is smaller than the handle says, or it was not exported or sent to this receiver.
        """
        token = handle.token(self.number)
        if isinstance(token, Parcel):
            return self._arrived(handle)
        if isinstance(token, OwnMemory):
            return _senders[handle.sender].last
        allocation, buffer = self._mapped.get(handle.sender, (0, None))
        if buffer is None or allocation != handle.allocation:
            self._mapped.pop(handle.sender, None)
            del buffer
            buffer = self._map(handle)
            self._mapped[handle.sender] = (handle.allocation, buffer)
        return view(buffer, handle.shape, handle.dtype)

    def constant(self, handle: Handle) -> Tensor:
        """The sender's tensor for many reads, where the sender writes it once for each allocation.

        The mapping itself, or, of a buffer on another device, a copy on this one that is made once and kept. Raises
        HandoffError as `tensor` does.
        """
        mapped = self.tensor(handle)
        if isinstance(handle.token(self.number), Parcel | OwnMemory) or self._is_near(handle):
            return mapped
        allocation, copy = self._copies.get(handle.sender, (0, None))
        if copy is None or allocation != handle.allocation:
            self._copies.pop(handle.sender, None)
            copy = mapped.clone()
            self.copied_bytes += handle.num_bytes
            self._copies[handle.sender] = (handle.allocation, copy)
        return copy

    def _arrived(self, handle: Handle) -> Tensor:
        if handle.sender not in self._rooms:
            raise HandoffError(
                f"student rank {self.number} is to read a teacher's buffer on another node before it was sent; whoever "
                "hands out the windows must have them sent first"
            )
        return view(self._rooms[handle.sender], handle.shape, handle.dtype)

    def close(self) -> None:
        """Drop every mapping and what was sent; may be called again."""
        self._mapped.clear()
        self._copies.clear()
        self._rooms.clear()
        self._collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _map(self, handle: Handle) -> Tensor:
        """The whole buffer as a flat uint8 tensor."""

    @abstractmethod
    def _is_near(self, handle: Handle) -> bool:
        """Whether the buffer is as fast to read as this process' own memory."""

    @abstractmethod
    def _collect(self) -> None: ...


def view(buffer: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The first bytes of a flat uint8 tensor as a tensor of `shape` and `dtype`."""
    return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(*shape)
