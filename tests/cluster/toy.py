"""A worker for tests of clusters."""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_opd.errors import ModelError, SenderGoneError
from nemo_opd.progress import working
from tests.waiting import wait_until

HANG_S = 60.0


class Toy:
    """A worker that can fail, hang or die on one rank only."""

    def __init__(self, refused: str = "") -> None:
        """refused: an error in the user's settings, or empty."""
        if refused:
            raise ModelError(refused)
        self.rank = dist.get_rank()
        self.is_closed = False

    def sum_of_ranks(self, offset: int) -> tuple[int, float]:
        total = torch.tensor([float(self.rank + offset)])
        dist.all_reduce(total)
        return self.rank, float(total)

    def fail_while_others_wait(self, rank: int, file: Path) -> None:
        if self.rank == rank:
            raise KeyError("no such thing")
        self.wait_for(file)

    def wait_for(self, file: Path) -> None:
        with working("waiting", 4, "pieces"):
            wait_until(file.exists, f"{file}")

    def die(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(HANG_S)

    def fail_in_a_collective(self, rank: int) -> None:
        if self.rank == rank:
            raise KeyError("no such thing")
        self.sum_of_ranks(0)

    def die_in_a_collective(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        self.sum_of_ranks(0)

    def miss_a_sender(self) -> None:
        raise SenderGoneError("its process has released it or died")

    def unpicklable(self) -> object:
        return threading.Lock()

    def close(self) -> None:
        self.is_closed = True
