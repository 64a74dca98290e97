"""Between nodes: tensors sent from a teacher's ranks to the student's by torch.distributed.

Communicates point to point, over NCCL on GPUs and gloo on CPUs, in a separate world for each teacher: the student's
ranks first, then the teacher's. NCCL gets all tensors of a call as one batch over the communicator of that world; one
at a time, it would make a communicator for each pair of ranks. Sender and receiver each name the same tensors in the
same order, and wait until all tensors of a call are transferred. The two worlds that workers compute in are not
involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.distributed.process_group import BACKENDS, connect_store
from nemo_opd.handoff.base import Receiver
from nemo_opd.handoff.handle import Handle, Message

_PREFIX = "handoff"
"""Prefix of the keys in a store that others use as well."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address at which the ranks of a link find each other, and their number."""

    host: str
    port: int
    """Port of a store that is served while the link is made."""
    num_students: int
    num_teachers: int
    timeout_s: float
    """Limit of making the link and of each call."""


class Link:
    """One rank's end of a link between the student and a teacher."""

    def __init__(self, rendezvous: Rendezvous, device: str, *, student: int | None = None, teacher: int = 0) -> None:
        """Join the link as this rank of the student or else of the teacher; every rank must do so."""
        self._device, self._num_students = device, rendezvous.num_students
        store = connect_store(rendezvous.host, rendezvous.port, rendezvous.timeout_s)
        rank = self._num_students + teacher if student is None else student
        size = rendezvous.num_students + rendezvous.num_teachers
        prefixed = dist.PrefixStore(_PREFIX, store)
        self._group: _Backend | None = _new_backend(prefixed, rank, size, device, rendezvous.timeout_s)

    def send(self, tensors: Sequence[tuple[Tensor, int]]) -> None:
        """Send contiguous tensors, each to a student rank; those on the host go through the device.

        Raises RuntimeError where the other side is gone.
        """
        assert self._group is not None
        self._transfer(self._group.send, [(tensor.to(self._device), rank) for tensor, rank in tensors], first=0)

    def receive(self, tensors: Sequence[tuple[Tensor, int]]) -> None:
        """Fill contiguous tensors, each from a teacher rank. Raises RuntimeError where the other side is gone."""
        assert self._group is not None
        self._transfer(self._group.recv, tensors, first=self._num_students)

    def _transfer(self, start: _Start, tensors: Sequence[tuple[Tensor, int]], *, first: int) -> None:
        """Transfer tensors to or from the ranks of one side, which count from `first` on."""
        assert self._group is not None
        coalesces = self._group.supports_coalescing
        if coalesces:
            self._group._start_coalescing()
        # All are started before any is waited for, so that no order of pairs can deadlock.
        works = [start([_flat_bytes(tensor)], first + rank, 0) for tensor, rank in tensors if tensor.numel()]
        for work in [self._group._end_coalescing()] if coalesces else works:
            if work is not None:
                work.wait()
        if self._device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Leave the link without waiting for the other ends, which may be gone; may be called again."""
        if self._group is not None:
            self._group.abort()
            self._group = None


class StudentLinks:
    """A student rank's ends of the links to teachers on other nodes, whose messages it puts into its receiver."""

    def __init__(self, receiver: Receiver, device: str) -> None:
        self._receiver, self._device = receiver, device
        self._links: list[Link | None] = []

    def join(self, rendezvous: Sequence[Rendezvous | None]) -> None:
        """Join the link of each teacher; None: it sends nothing. Every rank must call it."""
        rank = self._receiver.number
        self._links = [None if each is None else Link(each, self._device, student=rank) for each in rendezvous]

    def receive(self, by_teacher: Sequence[Sequence[Handle]]) -> None:
        """Receive the messages that these handles read. Raises RuntimeError where a teacher's rank is gone."""
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


class _Start(Protocol):
    """`send` or `recv` of a backend."""

    def __call__(self, tensors: list[Tensor], rank: int, tag: int, /) -> dist.Work: ...


class _Backend(Protocol):
    """Methods of torch.distributed's backends that its stubs omit."""

    supports_coalescing: bool

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work: ...

    def eager_connect_single_device(self, device: torch.device, /) -> None: ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> dist.Work | None: ...

    def abort(self) -> None: ...


def _new_backend(store: dist.Store, rank: int, size: int, device: str, timeout_s: float) -> _Backend:
    """Make a backend in addition to the default world, which torch.distributed's functions would use."""
    timeout = timedelta(seconds=timeout_s)
    if BACKENDS[device] == "gloo":
        return cast("_Backend", dist.ProcessGroupGloo(store, rank, size, timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    made = cast("_Backend", dist.ProcessGroupNCCL(store, rank, size, options))
    # All ranks must take part in making the communicator, but not in each transfer.
    made.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return made


def _flat_bytes(tensor: Tensor) -> Tensor:
    """Return a view as bytes: backends do not know every dtype."""
    return tensor.view(-1).view(torch.uint8)
