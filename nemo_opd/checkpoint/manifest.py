"""Size and SHA-256 of every file of a checkpoint: written last, compared before anything else is read.

The driver writes it once all ranks have written, on the file system that they share: it reads the files as a resumed
run will find them. A hash is what `sha256sum` prints.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from nemo_opd.checkpoint.typed import read_typed
from nemo_opd.errors import DamagedError
from nemo_opd.files import files_below, settle, sync, write_synced
from nemo_opd.progress import Work, working

MANIFEST = "manifest.json"
CHUNK = 1 << 22
"""Bytes read at a time."""
MAX_THREADS = 16
SHOWN_DIGITS = 16
"""Of a hash in a message."""


class Entry(BaseModel):
    """A file as it was written."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size: Annotated[int, Field(ge=0)]
    """Bytes."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """The files of a checkpoint, by their paths in it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1] = 1
    files: dict[str, Entry]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(entry.size for entry in self.files.values())


def seal(folder: Path) -> None:
    """Wait until the files below `folder` are on the disk, and write its manifest. Raises OSError."""
    (folder / MANIFEST).unlink(missing_ok=True)
    settle(folder)
    files = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    hashes = hashes_of(files, sum(sizes.values()), f"hashing {folder.name}")
    manifest = Manifest(files={name: Entry(size=sizes[name], sha256=hashes[name]) for name in files})
    write_synced(folder / MANIFEST, json.dumps(manifest.model_dump(), indent=1).encode())
    sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """Raises DamagedError where it is absent or no manifest."""
    return read_typed(folder / MANIFEST, Manifest)


def require_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise DamagedError, naming the file, where one is absent or of another length than was written."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{folder} is damaged: {name} is missing ({entry.size:,} bytes were written)")
        if (size := path.stat().st_size) != entry.size:
            raise DamagedError(f"{folder} is damaged: {name} has {size:,} bytes, and {entry.size:,} were written")


def require_hashes(folder: Path, manifest: Manifest) -> None:
    """Raise DamagedError, naming the file, where one has other bytes than were written."""
    paths = {name: folder / name for name in manifest.files}
    hashes = hashes_of(paths, manifest.size, f"checking {folder.name}")
    for name, entry in manifest.files.items():
        if hashes[name] != entry.sha256:
            found, written = (f"{each[:SHOWN_DIGITS]}…" for each in (hashes[name], entry.sha256))
            raise DamagedError(
                f"{folder} is damaged: {name} ({entry.size:,} bytes) has the SHA-256 {found}, and {written} was written"
            )


def hashes_of(paths: Mapping[str, Path], total: int, what: str) -> dict[str, str]:
    """Return the SHA-256 of each file by name, several at a time."""
    stop = Event()
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with working(what, total, "B") as work, ThreadPoolExecutor(threads) as pool:
        try:
            # The largest first, so that none of them is alone at the end.
            order = sorted(paths, key=lambda name: -paths[name].stat().st_size)
            digests = pool.map(lambda name: sha256(paths[name], work, stop), order)
            return dict(zip(order, digests, strict=True))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def sha256(path: Path, work: Work, stop: Event) -> str:
    """Return the digest; hashlib lets other threads run meanwhile."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while not stop.is_set() and (chunk := file.read(CHUNK)):
            digest.update(chunk)
            work.advance(len(chunk))
    return digest.hexdigest()
