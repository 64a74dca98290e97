"""Safe reading of a sharded state's index, which torch pickles.

Unpickling looks up names, so a crafted pickle can run any code. Here no name is looked up: the names that torch writes
become `_Named` values, from which this module builds the metadata, and any other name is refused. An index crafted to
run endlessly (hashing nested tuples can) is not detected.
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
