"""Sharded states on disk, written and read by torch.distributed.checkpoint, without running anything that is read."""

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nemo_opd.checkpoint.metadata import SafeReader
from nemo_opd.disk import error_number
from nemo_opd.files import sync


class _SafePlanner(DefaultLoadPlanner):
    """A planner that reads what is no tensor with weights_only=True."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert read_item.type is LoadItemType.BYTE_IO
        # torch would unpickle the file; it gets a copy of what was read without running anything.
        copy = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), copy)
        copy.seek(0)
        super().load_bytes(read_item, copy)


class _Writer(FileSystemWriter):
    """A writer whose shards are on the disk when it returns; torch syncs files before it has written all of them.

    Raises OSError where the disk does not take a file; torch hides it behind an error of its writer of archives.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner)
            for name in {result.storage_data.relative_path for result in written.value()}:
                sync(Path(self.path) / name)
            return written
        except Exception as error:
            if (number := error_number(error)) is None:
                raise
            # Without its cause, which cannot be sent to the other ranks.
            raise OSError(number, os.strerror(number)) from None


def write_sharded(state: dict[str, Any], folder: Path, *, no_dist: bool = False) -> None:
    """Write the shards of all ranks; no_dist: whole tensors, by one process.

    Raises on every rank what one of them raised: OSError where the disk is at fault.
    """
    with _errors_of_ranks():
        dcp.save(state, storage_writer=_Writer(folder), no_dist=no_dist)


def read_sharded(state: dict[str, Any], folder: Path, *, no_dist: bool = False) -> None:
    """Read into the tensors of `state`, in place. Raises on every rank what one of them raised."""
    with _errors_of_ranks():
        dcp.load(state, storage_reader=SafeReader(folder), planner=_SafePlanner(), no_dist=no_dist)


@contextmanager
def _errors_of_ranks() -> Iterator[None]:
    """Raise what the lowest rank raised among those that failed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # no_dist asks for that
        try:
            yield
        except CheckpointException as error:  # which is no Exception
            raise next((cause for _, (cause, _) in sorted(error.failures.items())), error) from error
