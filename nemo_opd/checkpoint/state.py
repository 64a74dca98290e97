"""The student's sharded training state: master weights, optimizer, schedule and random generators.

It is written and read by torch.distributed.checkpoint, without running code from the files.
"""

import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from nemo_opd.checkpoint.manager import INSTEAD
from nemo_opd.distributed.collectives import NotFinite, find_not_finite
from nemo_opd.errors import CheckpointError, NotFiniteError
from nemo_opd.files import error_number, storage_errors, sync, write_synced
from nemo_opd.models.folder import first_line

_METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"


class MetadataError(Exception):
    """Error of an index with content that torch does not write."""


class _Named:
    """Arguments and state of a pickled object, without running its class or function."""

    build: "_Build"
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "_Named":
        named = super().__new__(cls)
        named.arguments, named.state = arguments, {}
        return named

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Builder:
    """Builder that replaces each `_Named` value by the object that it stands for."""

    def __init__(self) -> None:
        # Keyed by identity, with the value to keep it alive. A few bytes can refer to one value so often that building
        # it for each reference would take too long.
        self._built: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, _Named | dict | list | tuple):
            return value
        if id(value) not in self._built:
            self._built[id(value)] = value, self._build(value)
        return self._built[id(value)][1]

    def _build(self, value: Any) -> Any:
        if isinstance(value, _Named):
            return value.build(value, self)
        if isinstance(value, dict):
            return {self(key): self(item) for key, item in value.items()}
        return type(value)(self(item) for item in value)


_Build = Callable[[_Named, _Builder], object]


def _from_fields(kind: Callable[..., object]) -> _Build:
    """Return a function that builds a dataclass from its pickled fields."""
    return lambda named, builder: kind(**{name: builder(value) for name, value in named.state.items()})


def _size(named: _Named, builder: _Builder) -> torch.Size:
    return torch.Size(*map(builder, named.arguments))


def _properties(named: _Named, builder: _Builder) -> TensorProperties:
    properties = TensorProperties()
    properties.__setstate__(tuple(map(builder, named.state)))
    return properties


def _shard(named: _Named, builder: _Builder) -> _StorageInfo:
    """Build the location of a tensor, which must be an unencoded file in the same folder."""
    info = _StorageInfo(**{name: builder(value) for name, value in named.state.items()})
    if PurePath(info.relative_path).name != info.relative_path or info.transform_descriptors:
        raise MetadataError(f"no run has written a tensor in {info.relative_path!r}")
    return info


_BUILDERS: Mapping[tuple[str, str], _Build] = {
    (_MODULE, "Metadata"): _from_fields(Metadata),
    (_MODULE, "MetadataIndex"): _from_fields(MetadataIndex),
    (_MODULE, "TensorStorageMetadata"): _from_fields(TensorStorageMetadata),
    (_MODULE, "BytesStorageMetadata"): _from_fields(BytesStorageMetadata),
    (_MODULE, "ChunkStorageMetadata"): _from_fields(ChunkStorageMetadata),
    (_MODULE, "StorageMeta"): _from_fields(StorageMeta),
    (_MODULE, "TensorProperties"): _properties,
    (_MODULE, "_MEM_FORMAT_ENCODING"): lambda named, _: _MEM_FORMAT_ENCODING(*named.arguments),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _shard,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): lambda named, _: torch.strided,
    **{
        (module, name): lambda named, _: str(PurePath(*named.arguments))
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}
"""Build functions, keyed by pickled module and name."""
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""Dtypes, keyed by their pickled names such as torch.float32."""


class _NamesOnly(pickle.Unpickler):
    """Unpickler that turns the names that torch writes into `_Named` values instead of looking them up."""

    def find_class(self, module: str, name: str) -> Any:
        if (build := _BUILDERS.get((module, name))) is not None:
            # A new class each time, so that attributes that a pickle sets on it have no effect elsewhere.
            return type("_Named", (_Named,), {"build": staticmethod(build)})
        if (dtype := _DTYPES.get(f"{module}.{name}")) is not None:
            return dtype
        raise MetadataError(f"it names {module}.{name}, which no run writes there; it was not run")


def read_metadata(state: Path) -> Metadata:
    """Read the index of a sharded state.

    Raises MetadataError if torch has not written the index, and OSError if it is missing.
    """
    with (state / _METADATA).open("rb") as file:
        try:
            metadata = _Builder()(_NamesOnly(file).load())
        except MetadataError:
            raise
        except Exception as error:  # arbitrary bytes can make the unpickler raise anything
            raise MetadataError(f"it is not an index ({error})") from error
    if not isinstance(metadata, Metadata):
        raise MetadataError("it is not an index of tensors")
    return metadata


class SafeReader(FileSystemReader):
    """Reader of a sharded state that reads the index without running code from it."""

    # Without an argument for the rank, torch does not look for an index of each rank, which it would unpickle.
    def read_metadata(self) -> Metadata:
        """Read the index. torch sends the errors of this method to all ranks."""
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


_Averages = Mapping[str, dict[str, torch.Tensor]]
"""Averages of the weights, keyed by any name and then by parameter, sharded as the parameters are."""


@dataclass(frozen=True)
class State:
    """The state of a rank."""

    shared: dict[str, Any]
    """Sharded tensors, which all ranks write together."""
    per_rank: dict[str, Any]
    """Schedule and random generators of this rank."""


def read_state(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, averages: _Averages | None) -> State:
    """Return the current state, without copies. Collective.

    Raises NotFiniteError on all ranks if a weight, moment or average is NaN or infinite.
    """
    weights, optimizer_state = get_state_dict(model, optimizer)
    if (problem := not_finite_in(weights, optimizer_state, averages)) is not None:
        raise NotFiniteError(
            f"the student's training state is not finite after its last update, so it is not saved: {problem}; earlier "
            "checkpoints are unchanged. Lower student.optimizer.lr, or set train.gradient_clip"
        )
    return State(
        sharded_state(weights, optimizer_state, averages),
        {"scheduler": scheduler.state_dict(), "rng": _random_state()},
    )


def write_state(folder: Path, state: State, *, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's shards. The state can be read with another number of ranks. Collective.

    group: process group of all ranks, by default the default group. Raises CheckpointError if the disk fails.
    """
    with storage_errors(folder, CheckpointError, needed=_num_bytes(state.shared), instead=INSTEAD):
        write_sharded(state.shared, folder, group=group)
        write_rank_file(folder, dist.get_rank(), state.per_rank)


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
    """Return the bytes of all tensors in nested containers, with the full size of sharded tensors."""
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))


def write_rank_file(folder: Path, rank: int, content: Mapping[str, Any]) -> None:
    """Write the state that a rank has in addition to its shards. Raises OSError with the cause, which torch hides."""
    archive = io.BytesIO()
    torch.save(content, archive)
    write_synced(folder / rank_file(rank), archive.getvalue())


def rank_file(rank: int) -> str:
    """Return the name of the file of a rank's schedule and random generators."""
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
    """Read the state that `save_state` wrote, in place. Collective.

    tp: number of consecutive ranks that share matrices; these get the same generators, whatever layout was saved.
    Raises CheckpointError, naming the folder, if the state cannot be read or is not finite.
    """
    weights, optimizer_state = get_state_dict(model, optimizer)
    groups: Any = optimizer_state["param_groups"]
    current_fused = [group.get("fused") for group in groups]
    try:
        read_sharded(sharded_state(weights, optimizer_state, averages), folder)
        file = folder / rank_file(dist.get_rank() // tp * tp)
        if not file.exists():  # more ranks than before: additional ranks start with rank 0's schedule and generators
            file = folder / rank_file(0)
        rank_state = _read_rank_file(file)
    except Exception as error:
        raise _unreadable(folder, error) from error
    if (problem := not_finite_in(weights, optimizer_state, averages)) is not None:
        raise CheckpointError(f"{folder} is not finite: {problem}; remove this checkpoint to use the previous one")
    # Whether kernels are fused depends on this machine, and the device of AdamW's step counters on that.
    for group, fused in zip(groups, current_fused, strict=True):
        if "fused" in group:
            group["fused"] = fused
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)
    try:
        scheduler.load_state_dict(rank_state["scheduler"])
        _restore_random_state(rank_state["rng"])
    except Exception as error:  # torch may raise anything for invalid content
        raise _unreadable(file, error) from error


def _read_rank_file(file: Path) -> dict[str, Any]:
    """Read a rank's file. Raises TypeError for unexpected content, and the errors of torch.load."""
    rank_state = torch.load(file, weights_only=True)
    if not isinstance(rank_state, dict) or not all(
        isinstance(rank_state.get(key), dict) for key in ("scheduler", "rng")
    ):
        raise TypeError(f"{file.name} lacks scheduler or rng")
    return rank_state


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({first_line(error)}): it is damaged, or not a run's state; remove this checkpoint to "
        "use the previous one"
    )


def not_finite_in(
    weights: dict[str, Any], optimizer_state: dict[str, Any], averages: _Averages | None
) -> NotFinite | None:
    """Find a non-finite value in weights, moments and averages; step counters are ignored. Collective."""
    moments = {
        f"{key} of {name}": value
        for name, entries in optimizer_state["state"].items()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    means = {f"average of {name}": value for mean in (averages or {}).values() for name, value in mean.items()}
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
    """A load planner that reads other values than tensors with weights_only=True."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert read_item.type is LoadItemType.BYTE_IO
        # torch would unpickle the file, so it gets a copy of values that were read safely.
        copy = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), copy)
        copy.seek(0)
        super().load_bytes(read_item, copy)


class _Writer(FileSystemWriter):
    """A writer whose shards are on disk when it returns; torch syncs files before it has written them completely.

    Raises OSError if the disk fails; torch would raise an error of its archive writer instead.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner)
            for name in {result.storage_data.relative_path for result in written.value()}:
                sync(Path(self.path) / name)
            return written
        except Exception as error:
            if (number := error_number(error)) is None:
                raise
            # Drop the cause, which cannot be sent to the other ranks.
            raise OSError(number, os.strerror(number)) from None


def write_sharded(
    state: dict[str, Any], folder: Path, *, no_dist: bool = False, group: dist.ProcessGroup | None = None
) -> None:
    """Write the shards of all ranks, or with `no_dist` full tensors from one process.

    group: process group of all ranks. Raises the error of one rank on every rank: OSError if the disk fails.
    """
    with _errors_of_ranks():
        dcp.save(state, storage_writer=_Writer(folder), no_dist=no_dist, process_group=group)


def read_sharded(state: dict[str, Any], folder: Path, *, no_dist: bool = False) -> None:
    """Read into the tensors of `state`, in place. Raises the error of one rank on every rank."""
    with _errors_of_ranks():
        dcp.load(state, storage_reader=SafeReader(folder), planner=_SafePlanner(), no_dist=no_dist)


@contextmanager
def _errors_of_ranks() -> Iterator[None]:
    """Raise the error of the lowest rank that failed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # intended with no_dist
        try:
            yield
        except CheckpointException as error:  # a BaseException that is not an Exception
            raise next((cause for _, (cause, _) in sorted(error.failures.items())), error) from error
