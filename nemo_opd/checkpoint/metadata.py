"""The index of a sharded state, which torch pickles, read without running anything.

A crafted pickle can run any code where the names in it are looked up. Here no name is: those that torch writes become
`_Named` values, from which this module builds the metadata, and all others are refused. An index that is made to take
for ever (Python's hashes of nested tuples do) is not detected.
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
_OF_METADATA = "torch.distributed.checkpoint.metadata"


class MetadataError(Exception):
    """Error for an index with content that torch does not write."""


class _Named:
    """Arguments and state of a class or function in an index; nothing of it runs."""

    build: "_Build"
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "_Named":
        named = super().__new__(cls)
        named.arguments, named.state = arguments, {}
        return named

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Built:
    """Builder that replaces each `_Named` value by what it stands for."""

    def __init__(self) -> None:
        # By identity, and kept alive: a few bytes can mention one value too often to build it for each mention.
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, _Named | dict | list | tuple):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, self._made(value)
        return self._known[id(value)][1]

    def _made(self, value: Any) -> Any:
        if isinstance(value, _Named):
            return value.build(value, self)
        if isinstance(value, dict):
            return {self(key): self(each) for key, each in value.items()}
        return type(value)(self(each) for each in value)


_Build = Callable[[_Named, _Built], object]


def _of_fields(kind: Callable[..., object]) -> _Build:
    """Return a builder of a dataclass from its stored fields."""
    return lambda named, built: kind(**{name: built(value) for name, value in named.state.items()})


def _size(named: _Named, built: _Built) -> torch.Size:
    return torch.Size(*map(built, named.arguments))


def _properties(named: _Named, built: _Built) -> TensorProperties:
    made = TensorProperties()
    made.__setstate__(tuple(map(built, named.state)))
    return made


def _shard(named: _Named, built: _Built) -> _StorageInfo:
    """Build the location of a tensor, which must be an unencoded file of the same folder."""
    info = _StorageInfo(**{name: built(value) for name, value in named.state.items()})
    if PurePath(info.relative_path).name != info.relative_path or info.transform_descriptors:
        raise MetadataError(f"a tensor in {info.relative_path!r} is none that a run has written")
    return info


_BUILDERS: Mapping[tuple[str, str], _Build] = {
    (_OF_METADATA, "Metadata"): _of_fields(Metadata),
    (_OF_METADATA, "MetadataIndex"): _of_fields(MetadataIndex),
    (_OF_METADATA, "TensorStorageMetadata"): _of_fields(TensorStorageMetadata),
    (_OF_METADATA, "BytesStorageMetadata"): _of_fields(BytesStorageMetadata),
    (_OF_METADATA, "ChunkStorageMetadata"): _of_fields(ChunkStorageMetadata),
    (_OF_METADATA, "StorageMeta"): _of_fields(StorageMeta),
    (_OF_METADATA, "TensorProperties"): _properties,
    (_OF_METADATA, "_MEM_FORMAT_ENCODING"): lambda named, _: _MEM_FORMAT_ENCODING(*named.arguments),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _shard,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): lambda named, _: torch.strided,
    **{
        (module, name): lambda named, _: str(PurePath(*named.arguments))
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}
"""Builders by module and name, as they are pickled."""
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""Dtypes by their names in a pickle, such as torch.float32."""


class _NamesOnly(pickle.Unpickler):
    """Unpickler that makes `_Named` values of the names that torch writes into an index, and looks none of them up."""

    def find_class(self, module: str, name: str) -> Any:
        if (build := _BUILDERS.get((module, name))) is not None:
            # A class for each mention, so that what a pickle sets on it has no effect elsewhere.
            return type("_Named", (_Named,), {"build": staticmethod(build)})
        if (dtype := _DTYPES.get(f"{module}.{name}")) is not None:
            return dtype
        raise MetadataError(f"it names {module}.{name}, which no run writes there; nothing of it was run")


def read_metadata(state: Path) -> Metadata:
    """Read the index of a sharded state.

    Raises MetadataError for an index that torch has not written, OSError where there is none.
    """
    with (state / _METADATA).open("rb") as file:
        try:
            metadata = _Built()(_NamesOnly(file).load())
        except MetadataError:
            raise
        except Exception as error:  # whatever the bytes of the file lead the unpickler into
            raise MetadataError(f"it is no index ({error})") from error
    if not isinstance(metadata, Metadata):
        raise MetadataError("it is no index of tensors")
    return metadata


class SafeReader(FileSystemReader):
    """Reader of a sharded state that reads the index without running anything."""

    # Has no argument for a rank, so torch does not look for an index of each rank, which it would unpickle.
    def read_metadata(self) -> Metadata:
        """Read the index; torch sends what the function of this name raises to all ranks."""
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
