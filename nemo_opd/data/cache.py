"""Samples that were made before, on disk (methods.md §1.7): tokenization and alignment once, not once per epoch."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import zlib
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from safetensors import SafetensorError

from nemo_opd.data.documents import Document
from nemo_opd.data.samples import Sample
from nemo_opd.data.stored import decoded, encoded
from nemo_opd.errors import ConfigError
from nemo_opd.paths import cache_dir

logger = logging.getLogger(__name__)

_VERSION = 8
"""Raised when a sample is stored, or made from the same settings, in another way than before."""
WAIT_S = 60.0
"""Seconds for another process to finish writing."""

_Made = TypeVar("_Made")
_Given = TypeVar("_Given", covariant=True)


class _Maker(Protocol[_Given]):
    """A SampleMaker or a WindowMaker."""

    @property
    def identity(self) -> str: ...

    def __call__(self, document: Document, /) -> _Given: ...


class _CachedMaker(ABC, Generic[_Made]):
    """Document → what `make` makes of it, read from `samples/<settings>.sqlite` in the cache folder where it is there.

    A document is found by its content, so the file serves every dataset, order and run with these settings. Processes
    share it: SQLite writes each sample whole or not at all, also when a process is killed. A file that is damaged is
    begun again, one that is deleted while in use too, and a sample that is damaged is made again. What cannot be used
    (a full disk, a read-only folder, one without locks, a lock that another process keeps) is left alone, with a
    warning.
    """

    def __init__(self, make: _Maker[_Made]) -> None:
        self._make = make
        self.identity = make.identity
        digest = hashlib.sha256(f"{_VERSION} {self.identity}".encode()).hexdigest()
        self._store: Store | None = None
        self._is_usable = True
        try:
            self._path = cache_dir("samples") / f"{digest[:32]}.sqlite"
        except ConfigError as error:
            logger.warning("samples are not cached: %s", error)
            self._is_usable = False

    def __call__(self, document: Document) -> _Made:
        """Return what is made of the document, from the file where it has it. Raises what making raises."""
        key = _key_of(document)
        if (stored := self._read(key)) is not None:
            try:
                return self._decoded(stored)
            except (zlib.error, SafetensorError, KeyError, ValueError) as error:
                logger.warning("%s holds a damaged sample (%s), which is made again", self._path, error)
        made = self._make(document)
        self._write(key, self._encoded(made))
        return made

    @abstractmethod
    def _encoded(self, made: _Made) -> bytes: ...

    @abstractmethod
    def _decoded(self, value: bytes) -> _Made: ...

    def __getstate__(self) -> dict[str, object]:
        """Leave the connection out, which belongs to one process."""
        return self.__dict__ | {"_store": None}

    def _read(self, key: bytes) -> bytes | None:
        try:
            return self._opened().get(key) if self._is_usable else None
        except sqlite3.OperationalError as error:
            self._give_up(error)
        except sqlite3.DatabaseError as error:
            self._begin_again(error)
        return None

    def _write(self, key: bytes, value: bytes) -> None:
        try:
            if self._is_usable:
                self._opened().put(key, value)
        except sqlite3.DatabaseError as error:
            self._give_up(error)

    def _opened(self) -> Store:
        if self._store is not None and not self._store.is_in_place():
            # SQLite goes on with a file that no other process will find, and may not notice.
            logger.warning("%s was deleted while in use and is begun again", self._path)
            self._store = None
        if self._store is None:
            self._store = Store(self._path)
        return self._store

    def _give_up(self, error: sqlite3.DatabaseError | OSError) -> None:
        logger.warning("samples are not cached in %s (%s); set data.cache=false or $NEMO_OPD_CACHE", self._path, error)
        self._is_usable = False

    def _begin_again(self, error: sqlite3.DatabaseError) -> None:
        logger.warning("%s is damaged (%s) and begun again", self._path, error)
        self._store = None
        try:
            for suffix in ("", "-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        except OSError as refused:
            self._give_up(refused)


class CachedSampleMaker(_CachedMaker[Sample]):
    """Document → Sample."""

    def _encoded(self, made: Sample) -> bytes:
        return encoded((made,))

    def _decoded(self, value: bytes) -> Sample:
        (sample,) = decoded(value)
        return sample


class CachedWindowMaker(_CachedMaker[tuple[Sample, ...]]):
    """Document → its windows."""

    def _encoded(self, made: tuple[Sample, ...]) -> bytes:
        return encoded(made)

    def _decoded(self, value: bytes) -> tuple[Sample, ...]:
        return decoded(value)


class Store:
    """Key → value in an SQLite file. Raises sqlite3.DatabaseError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
        # Readers do not wait for a writer; a crash of the machine, not of a process, may cost the newest samples.
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute("CREATE TABLE IF NOT EXISTS samples (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
        try:
            self._inode = path.stat().st_ino
        except FileNotFoundError as error:  # another process found it damaged, and begins again
            raise sqlite3.OperationalError(f"{path} has just been removed") from error

    def is_in_place(self) -> bool:
        """Return whether the path still leads to this file."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def get(self, key: bytes) -> bytes | None:
        row = self._connection.execute("SELECT value FROM samples WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def put(self, key: bytes, value: bytes) -> None:
        self._connection.execute("INSERT OR REPLACE INTO samples VALUES (?, ?)", (key, value))


def _key_of(document: Document) -> bytes:
    content = document if isinstance(document, str) else json.dumps(asdict(document), default=str)
    return hashlib.blake2b(content.encode(), digest_size=16).digest()
