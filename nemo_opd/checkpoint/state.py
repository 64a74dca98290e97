"""The sharded training state of the student: master weights, optimizer, schedule, random generators.

Written and read by torch.distributed.checkpoint, without running anything that is read.
"""

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from nemo_opd.checkpoint.manager import INSTEAD
from nemo_opd.checkpoint.metadata import SafeReader
from nemo_opd.disk import error_number, storage_errors
from nemo_opd.distributed.finite import NotFinite, find_not_finite
from nemo_opd.errors import CheckpointError, NotFiniteError
from nemo_opd.files import sync, write_synced
from nemo_opd.models.folder import first_line

_Averages = Mapping[str, dict[str, torch.Tensor]]
"""Averages of the weights by any name, each by parameter and sharded like it."""


@dataclass(frozen=True)
class State:
    """The state of a rank."""

    shared: dict[str, Any]
    """Tensors that all ranks write together, each its shards."""
    of_rank: dict[str, Any]
    """Schedule and random generators."""


def read_state(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, averages: _Averages | None) -> State:
    """Return the state as it is, without copies.

    Raises NotFiniteError on all ranks where a weight or a moment is NaN or infinite.
    """
    weights, optimizer_state = get_state_dict(model, optimizer)
    if (found := not_finite_in(weights, optimizer_state, averages)) is not None:
        raise NotFiniteError(
            f"the student's training state is not finite after its last update, so it is not saved: {found}; what was "
            "saved before is as it was. Lower student.optimizer.lr, or set train.gradient_clip"
        )
    return State(
        sharded_state(weights, optimizer_state, averages),
        {"scheduler": scheduler.state_dict(), "rng": _random_state()},
    )


def write_state(folder: Path, state: State, *, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's shards; the state can be read with another number of ranks.

    group: of all ranks, for collectives; None: the default one. Raises CheckpointError where the disk does not take it.
    """
    with storage_errors(folder, CheckpointError, needed=_num_bytes(state.shared), instead=INSTEAD):
        write_sharded(state.shared, folder, group=group)
        write_rank_file(folder, dist.get_rank(), state.of_rank)


def save_state(
    folder: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, averages: _Averages | None = None
) -> None:
    """Call `read_state` and `write_state`, and wait for the other ranks."""
    write_state(folder, read_state(model, optimizer, scheduler, averages))
    dist.barrier()


def sharded_state(weights: dict[str, Any], optimizer_state: object, averages: _Averages | None) -> dict[str, Any]:
    """Return the part of a state that all ranks write and read together."""
    state = {"model": weights, "optimizer": optimizer_state}
    return state | {"averages": dict(averages)} if averages else state


def _num_bytes(tensors: object) -> int:
    """Return the bytes of all tensors in nested containers, counting sharded ones whole."""
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))


def write_rank_file(folder: Path, rank: int, content: Mapping[str, Any]) -> None:
    """Write what a rank keeps in addition to its shards. Raises OSError with the cause, which torch would hide."""
    archive = io.BytesIO()
    torch.save(content, archive)
    write_synced(folder / rank_file(rank), archive.getvalue())


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's schedule and random generators."""
    return f"rank_{rank:05d}.pt"


def load_state(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    averages: _Averages | None = None,
    *,
    tp: int = 1,
) -> None:
    """Read what `save_state` wrote, in place.

    tp: number of consecutive ranks that share matrices. They get the same generators, whichever layout was saved.
    Raises CheckpointError, naming the folder, where it cannot be read or holds what is not finite.
    """
    weights, optimizer_state = get_state_dict(model, optimizer)
    groups: Any = optimizer_state["param_groups"]
    own_kernels = [group.get("fused") for group in groups]
    try:
        read_sharded(sharded_state(weights, optimizer_state, averages), folder)
        own = folder / rank_file(dist.get_rank() // tp * tp)
        # With more ranks than before, the additional ones start from rank 0's schedule and generators.
        file = own if own.exists() else folder / rank_file(0)
        rest = _read_rank_file(file)
    except Exception as error:
        raise _unreadable(folder, error) from error
    if (found := not_finite_in(weights, optimizer_state, averages)) is not None:
        raise CheckpointError(f"{folder} is not finite: {found}; remove this checkpoint to use the one before")
    # Fused kernels are this machine's choice, and where AdamW's step counters are depends on it.
    for group, fused in zip(groups, own_kernels, strict=True):
        if "fused" in group:
            group["fused"] = fused
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)
    try:
        scheduler.load_state_dict(rest["scheduler"])
        _restore_random_state(rest["rng"])
    except Exception as error:  # whatever torch makes of what is no state
        raise _unreadable(file, error) from error


def _read_rank_file(file: Path) -> dict[str, Any]:
    """Read a rank's file. Raises TypeError for content of another form, and what torch.load raises."""
    rest = torch.load(file, weights_only=True)
    if not isinstance(rest, dict) or not all(isinstance(rest.get(key), dict) for key in ("scheduler", "rng")):
        raise TypeError(f"{file.name} has no scheduler and no rng")
    return rest


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({first_line(error)}): it is damaged, or no state of a run; remove this checkpoint to "
        "use the one before"
    )


def not_finite_in(
    weights: dict[str, Any], optimizer_state: dict[str, Any], averages: _Averages | None
) -> NotFinite | None:
    """Find values that are not finite in weights, moments and averages; counters of steps are left out."""
    moments = {
        f"{key} of {name}": value
        for name, entries in optimizer_state["state"].items()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    means = {f"average of {name}": value for each in (averages or {}).values() for name, value in each.items()}
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)} | moments | means
    return find_not_finite(tensors, device=next(iter(tensors.values())).device)


def _random_state() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


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

    Raises OSError where the disk does not take a file; torch replaces it by an error of its writer of archives.
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


def write_sharded(
    state: dict[str, Any], folder: Path, *, no_dist: bool = False, group: dist.ProcessGroup | None = None
) -> None:
    """Write the shards of all ranks; no_dist: whole tensors, by one process. group: of all ranks, for collectives.

    Raises on every rank what one of them raised: OSError where the disk is at fault.
    """
    with _errors_of_ranks():
        dcp.save(state, storage_writer=_Writer(folder), no_dist=no_dist, process_group=group)


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
