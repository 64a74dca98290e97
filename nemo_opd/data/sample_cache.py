"""On-disk cache of samples (methods.md §1.7): tokenization and alignment run once, not once per epoch."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import zlib
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Generic, TypeVar

from safetensors import SafetensorError

from nemo_opd.data.row_types import Document
from nemo_opd.data.samples import Maker, Sample, decoded, encoded
from nemo_opd.errors import ConfigError
from nemo_opd.paths import cache_dir

_log = logging.getLogger(__name__)

_VERSION = 9
"""Increment when the stored format changes, or when the same settings yield other samples."""
WAIT_S = 60.0
"""Seconds to wait for another process to finish writing."""

_Result = TypeVar("_Result")


class _CachedMaker(ABC, Generic[_Result]):
    """A maker that reads a document's result from `samples/<settings>.sqlite` in the cache folder, or calls `make`.

    Documents are keyed by their content, so one file serves every dataset, order and run with these settings. Processes
    share it: SQLite writes a sample completely or not at all, even if a process is killed. A file that is damaged, or
    deleted while in use, is recreated; a damaged sample is rebuilt. If the file cannot be used (a full disk, a
    read-only folder, no locks, a lock that another process keeps), nothing is cached and a warning is logged.
    """

    def __init__(self, make: Maker[_Result]) -> None:
        self._make = make
        self.identity = make.identity
        digest = hashlib.sha256(f"{_VERSION} {self.identity}".encode()).hexdigest()
        self._store: _Store | None = None
        self._is_usable = True
        try:
            self._path = cache_dir("samples") / f"{digest[:32]}.sqlite"
        except ConfigError as error:
            _log.warning("samples are not cached: %s", error)
            self._is_usable = False

    def __call__(self, document: Document) -> _Result:
        """Return the result for a document, from the file if it is there. Raises the errors of `make`."""
        key = _key_of(document)
        if (stored := self._read(key)) is not None:
            try:
                return self._decode(stored)
            except (zlib.error, SafetensorError, KeyError, ValueError) as error:
                _log.warning("%s holds a damaged sample (%s), which is rebuilt", self._path, error)
        result = self._make(document)
        self._write(key, self._encode(result))
        return result

    @abstractmethod
    def _encode(self, result: _Result) -> bytes: ...

    @abstractmethod
    def _decode(self, value: bytes) -> _Result: ...

    def __getstate__(self) -> dict[str, object]:
        """Omit the connection, which belongs to one process."""
        return self.__dict__ | {"_store": None}

    def _read(self, key: bytes) -> bytes | None:
        try:
            return self._open().get(key) if self._is_usable else None
        except sqlite3.OperationalError as error:
            self._stop_caching(error)
        except sqlite3.DatabaseError as error:
            self._recreate(error)
        return None

    def _write(self, key: bytes, value: bytes) -> None:
        try:
            if self._is_usable:
                self._open().put(key, value)
        except sqlite3.DatabaseError as error:
            self._stop_caching(error)

    def _open(self) -> _Store:
        if self._store is not None and not self._store.is_in_place():
            # SQLite may not notice, and would go on with a file that no other process can find.
            _log.warning("%s was deleted while in use and is recreated", self._path)
            self._store = None
        if self._store is None:
            self._store = _Store(self._path)
        return self._store

    def _stop_caching(self, error: sqlite3.DatabaseError | OSError) -> None:
        _log.warning("samples are not cached in %s (%s); set data.cache=false or $NEMO_OPD_CACHE", self._path, error)
        self._is_usable = False

    def _recreate(self, error: sqlite3.DatabaseError) -> None:
        _log.warning("%s is damaged (%s) and is recreated", self._path, error)
        self._store = None
        try:
            for suffix in ("", "-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        except OSError as unlink_error:
            self._stop_caching(unlink_error)


class CachedSampleMaker(_CachedMaker[Sample]):
    """A cached SampleMaker."""

    def _encode(self, result: Sample) -> bytes:
        return encoded((result,))

    def _decode(self, value: bytes) -> Sample:
        (sample,) = decoded(value)
        return sample


class CachedWindowMaker(_CachedMaker[tuple[Sample, ...]]):
    """A cached WindowMaker."""

    def _encode(self, result: tuple[Sample, ...]) -> bytes:
        return encoded(result)

    def _decode(self, value: bytes) -> tuple[Sample, ...]:
        return decoded(value)


class _Store:
    """A key-value store in an SQLite file. Raises sqlite3.DatabaseError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
        # Readers do not wait for a writer. Only a crash of the machine, not of a process, can lose the newest samples.
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute("CREATE TABLE IF NOT EXISTS samples (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
        try:
            self._inode = path.stat().st_ino
        except FileNotFoundError as error:  # another process found it damaged and is recreating it
            raise sqlite3.OperationalError(f"{path} has just been removed") from error

    def is_in_place(self) -> bool:
        """Return whether the path still leads to the open file."""
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
