"""The manifest of a checkpoint: size and SHA-256 of every file, written last and checked before anything is read.

The driver writes it after all ranks have written, on their shared file system, so it reads the files as a resumed run
will. The hashes equal the output of `sha256sum`.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from nemo_opd.errors import CheckpointError, DamagedError, first_problem
from nemo_opd.files import files_below, settle, sync, write_synced
from nemo_opd.progress import Work, working

_T = TypeVar("_T")

MANIFEST = "manifest.json"
_CHUNK = 1 << 22
"""Bytes read at a time."""
_MAX_THREADS = 16
_SHOWN_DIGITS = 16
"""Digits of a hash in a message."""


class Entry(BaseModel):
    """Size and hash of a file when it was written."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size: Annotated[int, Field(ge=0)]
    """Bytes of the file."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Manifest(BaseModel):
    """The files of a checkpoint, keyed by their paths in it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1] = 1
    files: dict[str, Entry]

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def seal(folder: Path) -> None:
    """Wait until the files below `folder` are on disk, and write the manifest. Raises OSError."""
    (folder / MANIFEST).unlink(missing_ok=True)
    settle(folder)
    files = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    hashes = _hashes_of(files, sum(sizes.values()), f"hashing {folder.name}")
    manifest = _Manifest(files={name: Entry(size=sizes[name], sha256=hashes[name]) for name in files})
    write_synced(folder / MANIFEST, json.dumps(manifest.model_dump(), indent=1).encode())
    sync(folder)


def read_typed(file: Path, kind: type[_T]) -> _T:
    """Read and validate a JSON file of type `kind`.

    Raises DamagedError, naming the file and the key, if it is missing or invalid, and CheckpointError if permissions
    forbid reading it.
    """
    try:
        return TypeAdapter(kind).validate_json(file.read_bytes())
    except ValidationError as error:
        raise DamagedError(f"{file} is damaged: {first_problem(error)}") from None
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(f"{file} is missing") from None
    except PermissionError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); change its permissions") from None
    except OSError as error:
        raise DamagedError(f"{file} cannot be read ({error.strerror})") from None


def read_manifest(folder: Path) -> _Manifest:
    """Read a checkpoint's manifest. Raises the errors of `read_typed`."""
    return read_typed(folder / MANIFEST, _Manifest)


def require_sizes(folder: Path, manifest: _Manifest) -> None:
    """Raise DamagedError, naming the file, if one is missing or its size has changed."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{folder} is damaged: {name} is missing ({entry.size:,} bytes were written)")
        if (size := path.stat().st_size) != entry.size:
            raise DamagedError(f"{folder} is damaged: {name} has {size:,} bytes, but {entry.size:,} were written")


def require_hashes(folder: Path, manifest: _Manifest) -> None:
    """Raise DamagedError, naming the file, if the content of one has changed."""
    paths = {name: folder / name for name in manifest.files}
    hashes = _hashes_of(paths, manifest.size, f"checking {folder.name}")
    for name, entry in manifest.files.items():
        if hashes[name] != entry.sha256:
            raise DamagedError(
                f"{folder} is damaged: {name} ({entry.size:,} bytes) has the SHA-256 {hashes[name][:_SHOWN_DIGITS]}…, "
                f"but {entry.sha256[:_SHOWN_DIGITS]}… was written"
            )


def _hashes_of(paths: Mapping[str, Path], total: int, what: str) -> dict[str, str]:
    """Return the SHA-256 of each file, keyed by name; several files are read at a time."""
    stop = Event()
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with working(what, total, "B") as work, ThreadPoolExecutor(threads) as pool:
        try:
            # Largest first, so that no large file is read alone at the end.
            order = sorted(paths, key=lambda name: -paths[name].stat().st_size)
            digests = pool.map(lambda name: _sha256(paths[name], work, stop), order)
            return dict(zip(order, digests, strict=True))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _sha256(path: Path, work: Work, stop: Event) -> str:
    """Return a file's digest. hashlib releases the GIL, so threads run in parallel."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while not stop.is_set() and (chunk := file.read(_CHUNK)):
            digest.update(chunk)
            work.advance(len(chunk))
    return digest.hexdigest()
