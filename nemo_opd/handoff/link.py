"""Links between nodes, which send tensors from a teacher's ranks to the student's by torch.distributed, and their plan.

Communicates point to point, over NCCL on GPUs and gloo on CPUs, in a separate world for each teacher: the student's
ranks first, then the teacher's. NCCL gets all tensors of a call as one batch over that world's communicator; sending
them one at a time would create a communicator for each pair of ranks. Sender and receiver pass the same tensors in the
same order, and wait until all of them are transferred. The worlds that the workers compute in are not involved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.distributed.process_group import BACKENDS, connect_store
from nemo_opd.handoff.buffer import Handle, Message, Receiver
from nemo_opd.handoff.outputs import HiddenStatesWindow, Window

_PREFIX = "handoff"
"""Key prefix in a store that is used for other things as well."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address and size of a link: its ranks meet there."""

    host: str
    port: int
    """Port of a store that is served while the link is set up."""
    num_students: int
    num_teachers: int
    timeout_s: float
    """Limit for setting up the link and for each call."""


class Link:
    """One rank's end of a link between the student and a teacher."""

    def __init__(self, rendezvous: Rendezvous, device: str, *, student: int | None = None, teacher: int = 0) -> None:
        """Join the link as student rank `student`, or if that is None as teacher rank `teacher`. Collective."""
        self._device, self._num_students = device, rendezvous.num_students
        store = connect_store(rendezvous.host, rendezvous.port, rendezvous.timeout_s)
        rank = self._num_students + teacher if student is None else student
        size = rendezvous.num_students + rendezvous.num_teachers
        prefixed = dist.PrefixStore(_PREFIX, store)
        self._group = _new_backend(prefixed, rank, size, device, rendezvous.timeout_s)

    def send(self, tensors: Sequence[tuple[Tensor, int]]) -> None:
        """Send contiguous tensors, each to a student rank; host tensors are copied to the device first.

        Raises RuntimeError if the other side is gone.
        """
        self._transfer(self._group.send, [(tensor.to(self._device), rank) for tensor, rank in tensors], first=0)

    def receive(self, tensors: Sequence[tuple[Tensor, int]]) -> None:
        """Fill contiguous tensors, each from a teacher rank. Raises RuntimeError if the other side is gone."""
        self._transfer(self._group.recv, tensors, first=self._num_students)

    def _transfer(self, start: Callable[..., Any], tensors: Sequence[tuple[Tensor, int]], *, first: int) -> None:
        """Transfer tensors to or from one side, whose ranks begin at `first` in the link's world."""
        coalesces = self._group.supports_coalescing
        if coalesces:
            self._group._start_coalescing()
        # Start all transfers before waiting for any, so that no order of pairs can deadlock.
        # As bytes, because backends do not support every dtype.
        parts = [(tensor.view(-1).view(torch.uint8), first + rank) for tensor, rank in tensors if tensor.numel()]
        works = [start([tensor], rank, 0) for tensor, rank in parts]
        for work in [self._group._end_coalescing()] if coalesces else works:
            if work is not None:
                work.wait()
        if self._device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Leave the link without waiting for the other ranks, which may be gone; may be called again."""
        if self._group is not None:
            self._group.abort()
            self._group = None


class StudentLinks:
    """A student rank's links to teachers on other nodes, whose messages go into its receiver."""

    def __init__(self, receiver: Receiver, device: str) -> None:
        self._receiver, self._device = receiver, device
        self._links: list[Link | None] = []

    def join(self, rendezvous: Sequence[Rendezvous | None]) -> None:
        """Join the link of each teacher, except teachers with None, which send nothing. Collective."""
        rank = self._receiver.number
        self._links = [None if meeting is None else Link(meeting, self._device, student=rank) for meeting in rendezvous]

    def receive(self, by_teacher: Sequence[Sequence[Handle]]) -> None:
        """Receive the messages that these handles read. Raises RuntimeError if a teacher's rank is gone."""
        for link, handles in zip(self._links, by_teacher, strict=True):
            if link is not None:
                link.receive([self._target(handle) for handle in handles])

    def _target(self, handle: Handle) -> tuple[Tensor, int]:
        message = handle.token(self._receiver.number)
        assert isinstance(message, Message)
        return self._receiver.receive_buffer(handle, self._device), message.teacher_rank

    def close(self) -> None:
        """Leave all links; may be called again."""
        for link in self._links:
            if link is not None:
                link.close()


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages of one batch from one teacher, in the same order on both sides for each pair of ranks."""

    sends: tuple[tuple[Message, ...], ...]
    """Messages of each teacher rank."""
    receives: tuple[tuple[Handle, ...], ...]
    """Handles that each student rank reads its messages with."""

    @property
    def is_empty(self) -> bool:
        return not any(self.receives)


class ExchangePlanner:
    """Exchanges of one teacher: its output in every batch, and its head once for each reader."""

    def __init__(self, num_teacher_ranks: int) -> None:
        self._num_teacher_ranks = num_teacher_ranks
        self._sent_heads: set[tuple[int, str, int]] = set()
        """(student rank, sender, version) of each head that has been sent."""

    def plan(self, windows: Sequence[Window]) -> Exchange:
        """Return the messages that the student ranks' windows need and have not received yet."""
        sends: list[list[Message]] = [[] for _ in range(self._num_teacher_ranks)]
        receives: list[list[Handle]] = []
        for student_rank, window in enumerate(windows):
            heads = [handle for handle in _head_handles(window) if self._is_new(student_rank, handle)]
            receives.append([])
            for handle in (*heads, *_output_handles(window)):
                if isinstance(message := handle.token(student_rank), Message):
                    receives[-1].append(handle)
                    sends[message.teacher_rank].append(message)
        return Exchange(tuple(map(tuple, sends)), tuple(map(tuple, receives)))

    def _is_new(self, student_rank: int, handle: Handle) -> bool:
        key = student_rank, handle.sender, handle.version
        is_new = key not in self._sent_heads
        self._sent_heads.add(key)
        return is_new


def _output_handles(window: Window) -> Iterator[Handle]:
    views = (window.hidden,) if isinstance(window, HiddenStatesWindow) else window.shards
    for view in views:
        for part in view.parts:
            yield part.handle


def _head_handles(window: Window) -> Iterator[Handle]:
    if isinstance(window, HiddenStatesWindow):
        for shard in window.head:
            yield shard.weight
            if shard.bias is not None:
                yield shard.bias


def _new_backend(store: dist.Store, rank: int, size: int, device: str, timeout_s: float) -> Any:
    """Create a backend apart from the default world, which torch.distributed's functions use."""
    timeout = timedelta(seconds=timeout_s)
    if BACKENDS[device] == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend: Any = dist.ProcessGroupNCCL(store, rank, size, options)
    # All ranks must take part in creating the communicator, but not in each transfer.
    backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return backend
