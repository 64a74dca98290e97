"""A worker that breaks on request. Its process imports little, so it starts fast."""

import os
import signal
import time

import torch
import torch.distributed as dist

from nemo_opd.handoff.transport import TRANSPORTS
from tests.full_disk import largest_file

HANG_S = 3.0


class Faulty:
    """A worker with the methods of a teacher and of the student; each takes a fault and the rank that has it."""

    def __init__(self, dying_rank: int | None = None) -> None:
        self.rank = dist.get_rank()
        if self.rank == dying_rank:
            die()

    def forward(self, fault: str, rank: int) -> None:
        if self.rank == rank:
            getattr(self, fault)()

    def train_step(self, fault: str, rank: int) -> None:
        """Run the fault, then a collective that all ranks take part in."""
        self.forward(fault, rank)
        dist.all_reduce(torch.zeros(1))

    save = train_step

    def takes_too_much(self) -> None:
        torch.empty(1 << 60)

    def finds_shared_memory_full(self) -> None:
        sender, _ = TRANSPORTS["shared_memory"]
        with largest_file(1024):  # shared memory is a file
            sender().tensor((1 << 20,), torch.float32)

    def hangs(self) -> None:
        time.sleep(HANG_S)

    def dies(self) -> None:
        die()

    def close(self) -> None:
        """Do nothing: no resource is open."""


def die() -> None:
    """End this process by SIGKILL, as the kernel does if memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
