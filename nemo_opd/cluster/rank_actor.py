"""The process of one rank: joins its group's world, holds a worker, runs its methods."""

import traceback
from dataclasses import dataclass
from typing import Any

import torch

from nemo_opd.distributed import process_group


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as a value: raised in the driver, with the rank, while other ranks still wait for this one."""

    error: str
    traceback: str


class RankActor:
    def __init__(self, rank: int, world_size: int, device: str, threads: int, timeout_s: float) -> None:
        torch.set_num_threads(threads)
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self.store: torch.distributed.TCPStore | None = None
        self.worker: Any = None

    def serve(self) -> tuple[str, int]:
        """Rank 0 only: host and port where the group meets."""
        host = process_group.reachable_host()
        self.store = process_group.serve_store(host, self.timeout_s)
        return host, self.store.port

    def create(self, address: tuple[str, int], worker: type, arguments: dict[str, Any]) -> Failure | None:
        """Join the world and build the worker in it."""
        try:
            store = self.store or process_group.connect_store(*address, self.timeout_s)
            process_group.join(store, self.rank, self.world_size, self.device, self.timeout_s)
            self.worker = worker(**arguments)
        except Exception as error:
            return failure(error)
        return None

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """The method's result, or a Failure."""
        try:
            return getattr(self.worker, method)(*arguments)
        except Exception as error:
            return failure(error)

    def leave(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        process_group.leave()


def failure(error: Exception) -> Failure:
    return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
