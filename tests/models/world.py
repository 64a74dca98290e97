"""Ranks for tests of models: processes with gloo, or this process as one rank with a fake process group."""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import (
    _clear_fast_path_sharding_prop_cache,
    _clear_python_sharding_prop_cache,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import processes

Result = TypeVar("Result")


@contextmanager
def as_rank(rank: int, num_ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # torch caches layouts with the coordinates of this process's former rank.
        _clear_python_sharding_prop_cache()
        _clear_fast_path_sharding_prop_cache()


@contextmanager
def alone() -> Iterator[None]:
    """This process is the only rank of a gloo world."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_ranks(num_ranks: int, function: Callable[[Any], Result], argument: Any, folder: Path) -> list[Result]:
    """Return the result of function(argument) on each rank of a gloo world."""
    folder.mkdir(parents=True, exist_ok=True)
    processes.start(_rank, (num_ranks, function, argument, folder), num_ranks)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(num_ranks)]


def _rank(rank: int, num_ranks: int, function: Callable[[Any], Any], argument: Any, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120))
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(function(argument)))
    dist.barrier()
    # Skips the interpreter's teardown, which takes seconds with so many imports.
    os._exit(0)
