"""The index of a sharded state, which torch pickles, read without running anything.

A crafted pickle runs what its author likes where the names in it are looked up. Here none is: those that torch writes
become `Named` values, from which this module builds the metadata, and others end the reading. Beyond that is an index
made to take for ever: Python's own hashes of tuples in tuples do.
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

    build: "Build"
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "Named":
        named = super().__new__(cls)
        named.arguments, named.state = arguments, {}
        return named

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Built:
    """What was stored, with each `Named` value replaced by what it stands for."""

    def __init__(self) -> None:
        # By identity, and kept alive: a few bytes can mention one value so often that each mention cannot be built.
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Named | dict | list | tuple):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, self._made(value)
        return self._known[id(value)][1]

    def _made(self, value: Any) -> Any:
        if isinstance(value, Named):
            return value.build(value, self)
        if isinstance(value, dict):
            return {self(key): self(each) for key, each in value.items()}
        return type(value)(self(each) for each in value)


Build = Callable[[Named, Built], object]


def of_fields(kind: Callable[..., object]) -> Build:
    """Build a dataclass of the fields that were stored."""
    return lambda named, built: kind(**{name: built(value) for name, value in named.state.items()})


def size(named: Named, built: Built) -> torch.Size:
    return torch.Size(*map(built, named.arguments))


def properties(named: Named, built: Built) -> TensorProperties:
    made = TensorProperties()
    made.__setstate__(tuple(map(built, named.state)))
    return made


def shard(named: Named, built: Built) -> _StorageInfo:
    """Where a tensor lies: a file of the same folder, as it is."""
    info = _StorageInfo(**{name: built(value) for name, value in named.state.items()})
    if PurePath(info.relative_path).name != info.relative_path or info.transform_descriptors:
        raise MetadataError(f"a tensor in {info.relative_path!r} is none that a run has written")
    return info


BUILDERS: Mapping[tuple[str, str], Build] = {
    (OF_METADATA, "Metadata"): of_fields(Metadata),
    (OF_METADATA, "MetadataIndex"): of_fields(MetadataIndex),
    (OF_METADATA, "TensorStorageMetadata"): of_fields(TensorStorageMetadata),
    (OF_METADATA, "BytesStorageMetadata"): of_fields(BytesStorageMetadata),
    (OF_METADATA, "ChunkStorageMetadata"): of_fields(ChunkStorageMetadata),
    (OF_METADATA, "StorageMeta"): of_fields(StorageMeta),
    (OF_METADATA, "TensorProperties"): properties,
    (OF_METADATA, "_MEM_FORMAT_ENCODING"): lambda named, _: _MEM_FORMAT_ENCODING(*named.arguments),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): shard,
    ("torch", "Size"): size,
    ("torch.serialization", "_get_layout"): lambda named, _: torch.strided,
    **{
        (module, name): lambda named, _: str(PurePath(*named.arguments))
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


def read_metadata(state: Path) -> Metadata:
    """Raises MetadataError for an index that torch has not written, and OSError where there is none."""
    with (state / METADATA).open("rb") as file:
        try:
            metadata = Built()(NamesOnly(file).load())
        except MetadataError:
            raise
        except Exception as error:  # whatever the bytes of the file lead the unpickler into
            raise MetadataError(f"it is no index ({error})") from error
    if not isinstance(metadata, Metadata):
        raise MetadataError("it is no index of tensors")
    return metadata


class SafeReader(FileSystemReader):
    """Reads a sharded state by an index that is read without running anything."""

    # Without a rank as its argument: torch does not look for an index of each rank, which it would unpickle, either.
    def read_metadata(self) -> Metadata:
        """Raises what the function of this name does, where torch tells all ranks of it."""
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
