"""Between nodes: tensors sent from a teacher's ranks to the student's by torch.distributed.

Communicates point to point, over NCCL on GPUs and gloo on CPUs, in a world of its own for each teacher: the student's
ranks first, then the teacher's. Sender and receiver each name the same tensors in the same order, and wait until all of
a call have gone over; between calls nothing is under way. The two worlds that workers compute in know nothing of it.
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

PREFIX = "handoff"
"""Of the keys in a store that others use as well."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and as how many the ranks of a link find each other."""

    host: str
    port: int
    """Of a store that is served as long as the link is made."""
    num_students: int
    num_teachers: int
    timeout_s: float
    """Of making the link and of each call."""

    def student(self, rank: int) -> int:
        """In the world of the link."""
        return rank

    def teacher(self, rank: int) -> int:
        return self.num_students + rank


class Link:
    """One rank's end."""

    def __init__(self, meeting: Meeting, rank: int, device: str) -> None:
        """rank: in the world of the link. Every rank must make it."""
        self.meeting, self.device = meeting, device
        store = dist.PrefixStore(PREFIX, connect_store(meeting.host, meeting.port, meeting.timeout_s))
        size = meeting.num_students + meeting.num_teachers
        self._group: World | None = new_world(store, rank, size, device, meeting.timeout_s)

    def send(self, tensors: Sequence[tuple[Tensor, int]]) -> None:
        """Contiguous tensors, each to a student's rank. Raises RuntimeError where the other side is gone."""
        self._run([(tensor, self.meeting.student(rank)) for tensor, rank in tensors], is_sending=True)

    def receive(self, tensors: Sequence[tuple[Tensor, int]]) -> None:
        """Fill contiguous tensors, each from a teacher's rank. Raises RuntimeError where the other side is gone."""
        self._run([(tensor, self.meeting.teacher(rank)) for tensor, rank in tensors], is_sending=False)

    def _run(self, tensors: Sequence[tuple[Tensor, int]], *, is_sending: bool) -> None:
        assert self._group is not None
        run = self._group.send if is_sending else self._group.recv
        # All are under way before any is waited for, so that no order of pairs can be a circle.
        works = [run([flat_bytes(tensor)], peer, 0) for tensor, peer in tensors if tensor.numel()]
        for work in works:
            work.wait()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Without the other ends, which may be gone; may be called again."""
        if self._group is not None:
            self._group.abort()
            self._group = None


class World(Protocol):
    """What backends of torch.distributed have besides what their stubs say."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work: ...

    def abort(self) -> None: ...


def new_world(store: dist.Store, rank: int, size: int, device: str, timeout_s: float) -> World:
    """Beside the default one, of which torch.distributed's functions know: a backend of its own, called directly."""
    timeout = timedelta(seconds=timeout_s)
    if BACKENDS[device] == "gloo":
        return cast("World", dist.ProcessGroupGloo(store, rank, size, timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast("World", dist.ProcessGroupNCCL(store, rank, size, options))


def flat_bytes(tensor: Tensor) -> Tensor:
    """Of any dtype, of which backends know some."""
    return tensor.view(-1).view(torch.uint8)
