"""A worker for tests of what carries workers."""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist


class Toy:
    """Does on one rank what is asked and on the others something else."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def sum_of_ranks(self, offset: int) -> tuple[int, float]:
        total = torch.tensor([float(self.rank + offset)])
        dist.all_reduce(total)
        return self.rank, float(total)

    def fail_while_others_wait(self, rank: int, seconds: float) -> None:
        if self.rank == rank:
            raise KeyError("no such thing")
        time.sleep(seconds)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def unpicklable(self) -> object:
        return threading.Lock()

    def close(self) -> None:
        """Nothing is held."""
