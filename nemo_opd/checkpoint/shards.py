"""Files of a sharded training state: how they are written, read and checked for completeness.

torch.distributed.checkpoint writes and reads them; its index is read without running code from it.
"""

import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
from torch.distributed.checkpoint.storage import WriteResult

from nemo_opd.checkpoint.manager import STATE, STUDENT
from nemo_opd.errors import CheckpointError
from nemo_opd.files import error_number, require_uncompressed, sync, write_synced
from nemo_opd.models.folder import damage, safetensors_files

_METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"


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
        dcp.load(state, storage_reader=_SafeReader(folder), planner=_SafePlanner(), no_dist=no_dist)


@contextmanager
def _errors_of_ranks() -> Iterator[None]:
    """Raise the error of the lowest rank that failed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # intended with no_dist
        try:
            yield
        except CheckpointException as error:  # a BaseException that is not an Exception
            raise next((cause for _, (cause, _) in sorted(error.failures.items())), error) from error


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


class _SafePlanner(DefaultLoadPlanner):
    """A load planner that reads other values than tensors with weights_only=True."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert read_item.type is LoadItemType.BYTE_IO
        # torch would unpickle the file, so it gets a copy of values that were read safely.
        require_uncompressed(value)
        value.seek(0)
        copy = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), copy)
        copy.seek(0)
        super().load_bytes(read_item, copy)


class _SafeReader(FileSystemReader):
    """Reader of a sharded state that reads the index without running code from it."""

    # Without an argument for the rank, torch does not look for an index of each rank, which it would unpickle.
    def read_metadata(self) -> Metadata:
        """Read the index. torch sends the errors of this method to all ranks."""
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def write_rank_file(folder: Path, rank: int, content: Mapping[str, Any]) -> None:
    """Write the state that a rank has in addition to its shards. Raises OSError with the cause, which torch hides."""
    archive = io.BytesIO()
    torch.save(content, archive)
    write_synced(folder / rank_file(rank), archive.getvalue())


def rank_file(rank: int) -> str:
    """Return the name of the file of a rank's schedule and random generators."""
    return f"rank_{rank:05d}.pt"


def require_whole(checkpoint: Path, num_ranks: int) -> None:
    """Raise CheckpointError, naming the file, if one is missing or shorter than it should be.

    num_ranks: number of ranks that wrote it. Reads only indices and lengths; values were checked in memory.
    """
    problems = (*wrong_shards(checkpoint / STATE), *_wrong_rank_files(checkpoint / STATE, num_ranks))
    _require_none(checkpoint, [*problems, *_wrong_safetensors(checkpoint / STUDENT)])


def require_whole_export(folder: Path) -> None:
    """Raise CheckpointError, naming the file, if a Hugging Face folder of a model or an adapter is incomplete."""
    _require_none(folder, list(_wrong_safetensors(folder)))


def _require_none(folder: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{folder} was not written correctly: {problems[0]}; it is removed, and older ones are kept: check the "
            "disk, or choose another run.output_dir"
        )


def wrong_shards(state: Path) -> Iterator[str]:
    """Yield a description of each missing or truncated file of a sharded state."""
    try:
        entries = read_metadata(state).storage_data
    except (OSError, MetadataError) as error:
        yield f"{STATE}/.metadata cannot be read ({error})"
        return
    ends: dict[str, int] = {}
    for entry in entries.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, end in sorted(ends.items()):
        size = (state / name).stat().st_size if (state / name).is_file() else 0
        if size < end:
            yield f"{STATE}/{name} has {size:,} of {end:,} bytes"


def _wrong_rank_files(state: Path, num_ranks: int) -> Iterator[str]:
    for rank in range(num_ranks):
        file = state / rank_file(rank)
        if not file.is_file():
            yield f"{STATE} has no {file.name}"
        elif not zipfile.is_zipfile(file):  # the archive's directory is at its end
            yield f"{STATE}/{file.name} is truncated"


def _wrong_safetensors(folder: Path) -> Iterator[str]:
    try:
        # An adapter's file has another name than a model's files.
        files = safetensors_files(folder) or sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError) as error:
        yield f"{folder.name} has a damaged weight index ({error})"
        return
    if not files:
        yield f"{folder.name} has no weights"
    for file in files:
        if (reason := damage(file)) is not None:
            yield f"{folder.name}/{file.name} is missing or damaged ({reason})"


class MetadataError(Exception):
    """Error of an index with content that torch does not write."""


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
