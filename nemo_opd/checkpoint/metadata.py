"""The index of a sharded state, which torch pickles, read without running anything.

A crafted pickle runs what its author likes where the names in it are looked up. Here none is: those that torch writes
become `Named` values, from which this module builds the metadata, and others end the reading.
"""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
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

METADATA = ".metadata"
OF_METADATA = "torch.distributed.checkpoint.metadata"


class MetadataError(Exception):
    """An index that holds what torch does not write."""


class Named:
    """What an index has of a class or function: its arguments and its state, and nothing that runs."""

    build: Callable[["Named"], object]
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "Named":
        named = super().__new__(cls)
        named.arguments, named.state = arguments, {}
        return named

    def __setstate__(self, state: Any) -> None:
        self.state = state


def of_fields(kind: Callable[..., object]) -> Callable[[Named], object]:
    """Build a dataclass of the fields that were stored."""
    return lambda named: kind(**{name: built(value) for name, value in named.state.items()})


def size(named: Named) -> torch.Size:
    return torch.Size(*map(built, named.arguments))


def properties(named: Named) -> TensorProperties:
    made = TensorProperties()
    made.__setstate__(tuple(map(built, named.state)))
    return made


def shard(named: Named) -> _StorageInfo:
    """Where a tensor lies: a file of the same folder, as it is."""
    info = _StorageInfo(**{name: built(value) for name, value in named.state.items()})
    if PurePath(info.relative_path).name != info.relative_path or info.transform_descriptors:
        raise MetadataError(f"a tensor in {info.relative_path!r} is none that a run has written")
    return info


BUILDERS: Mapping[tuple[str, str], Callable[[Named], object]] = {
    (OF_METADATA, "Metadata"): of_fields(Metadata),
    (OF_METADATA, "MetadataIndex"): of_fields(MetadataIndex),
    (OF_METADATA, "TensorStorageMetadata"): of_fields(TensorStorageMetadata),
    (OF_METADATA, "BytesStorageMetadata"): of_fields(BytesStorageMetadata),
    (OF_METADATA, "ChunkStorageMetadata"): of_fields(ChunkStorageMetadata),
    (OF_METADATA, "StorageMeta"): of_fields(StorageMeta),
    (OF_METADATA, "TensorProperties"): properties,
    (OF_METADATA, "_MEM_FORMAT_ENCODING"): lambda named: _MEM_FORMAT_ENCODING(*named.arguments),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): shard,
    ("torch", "Size"): size,
    ("torch.serialization", "_get_layout"): lambda named: torch.strided,
    **{
        (module, name): lambda named: str(PurePath(*named.arguments))
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}
"""By module and name, as they are pickled."""
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""By their names in a pickle, such as torch.float32."""


class NamesOnly(pickle.Unpickler):
    """Makes `Named` values of the names that torch writes into an index, and looks none of them up."""

    def find_class(self, module: str, name: str) -> Any:
        if (build := BUILDERS.get((module, name))) is not None:
            # A class for each mention: what a pickle may set on it stays there.
            return type("Named", (Named,), {"build": staticmethod(build)})
        if (dtype := DTYPES.get(f"{module}.{name}")) is not None:
            return dtype
        raise MetadataError(f"it names {module}.{name}, which no run writes there; nothing of it was run")


def built(value: Any) -> Any:
    """Return what was stored, with each `Named` value replaced by what it stands for."""
    if isinstance(value, Named):
        return value.build(value)
    if isinstance(value, dict):
        return {built(key): built(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(built(each) for each in value)
    return value


def read_metadata(state: Path) -> Metadata:
    """Raises MetadataError for an index that torch has not written, and OSError where there is none."""
    with (state / METADATA).open("rb") as file:
        try:
            metadata = built(NamesOnly(file).load())
        except MetadataError:
            raise
        except Exception as error:  # whatever the bytes of the file lead the unpickler into
            raise MetadataError(f"it is no index ({error})") from error
    if not isinstance(metadata, Metadata):
        raise MetadataError("it is no index of tensors")
    return metadata


class SafeReader(FileSystemReader):
    """Reads a sharded state by an index that was read without running anything."""

    def __init__(self, state: Path) -> None:
        """Raises what `read_metadata` does."""
        super().__init__(state)
        self._metadata = read_metadata(state)

    # Without a rank as its argument: torch does not look for an index of each rank, which it would unpickle, either.
    def read_metadata(self) -> Metadata:
        metadata = self._metadata
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
