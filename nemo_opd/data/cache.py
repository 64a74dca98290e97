"""Samples that were made before, on disk (methods.md §1.7): tokenization and alignment once, not once per epoch."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from nemo_opd.data.documents import Document
from nemo_opd.data.samples import Chunks, Sample, SampleMaker, TeacherSample, Tokens
from nemo_opd.errors import ConfigError
from nemo_opd.paths import cache_dir

logger = logging.getLogger(__name__)

VERSION = 4
"""Raised when a sample is stored, or made from the same settings, in another way than before."""
WAIT_S = 60.0
"""Seconds for another process to finish writing."""


class CachedSampleMaker:
    """Document → Sample, read from `samples/<settings>.sqlite` in the cache folder where it is there.

    A document is found by its content, so the file serves every dataset, order and run with these settings. Processes
    share it: SQLite writes each sample whole or not at all, also when a process is killed. A file that is damaged is
    begun again, one that is deleted while in use too, and a sample that is damaged is made again. What cannot be used
    (a full disk, a read-only folder, one without locks, a lock that another process keeps) is left alone, with a
    warning.
    """

    def __init__(self, make: SampleMaker) -> None:
        self._make = make
        self.identity = make.identity
        digest = hashlib.sha256(f"{VERSION} {self.identity}".encode()).hexdigest()
        self._store: Store | None = None
        self._is_usable = True
        try:
            self._path = cache_dir("samples") / f"{digest[:32]}.sqlite"
        except ConfigError as error:
            logger.warning("samples are not cached: %s", error)
            self._is_usable = False

    def __call__(self, document: Document) -> Sample:
        """Raises what making the sample raises."""
        key = _key_of(document)
        if (stored := self._read(key)) is not None:
            try:
                return decoded(stored)
            except (zlib.error, SafetensorError, KeyError, ValueError) as error:
                logger.warning("%s holds a damaged sample (%s), which is made again", self._path, error)
        sample = self._make(document)
        self._write(key, encoded(sample))
        return sample

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
    content = document if isinstance(document, str) else json.dumps(asdict(document), sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


def encoded(sample: Sample) -> bytes:
    """Arrays by name, compressed."""
    arrays = named(sample.student, "student")
    for i, teacher in enumerate(sample.teachers):
        arrays[f"{i}.cross"] = np.array(teacher.chunks is not None)
        if teacher.tokens is not sample.student:
            arrays |= named(teacher.tokens, f"{i}")
        if teacher.chunks is not None:
            arrays |= {f"{i}.student_chunk": teacher.chunks.student, f"{i}.teacher_chunk": teacher.chunks.teacher}
            arrays[f"{i}.marks"] = teacher.chunks.marks
            arrays |= {f"{i}.limits": np.array([teacher.chunks.changed_from, teacher.chunks.stop])}
    return zlib.compress(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}), level=1)


def decoded(value: bytes) -> Sample:
    arrays = load(zlib.decompress(value))
    student = tokens(arrays, "student")
    num_teachers = sum(name.endswith(".cross") for name in arrays)

    def teacher(i: int) -> TeacherSample:
        own = tokens(arrays, f"{i}") if f"{i}.ids" in arrays else student
        if not arrays[f"{i}.cross"]:
            return TeacherSample(own, None)
        changed_from, stop = arrays[f"{i}.limits"].tolist()
        ours, theirs, marks = (arrays[f"{i}.{name}"] for name in ("student_chunk", "teacher_chunk", "marks"))
        chunks = Chunks(ours, theirs, changed_from, stop, marks)
        return TeacherSample(own, chunks)

    return Sample(student, tuple(teacher(i) for i in range(num_teachers)))


def named(side: Tokens, name: str) -> dict[str, NDArray[np.generic]]:
    return {f"{name}.ids": side.ids, f"{name}.loss_mask": side.loss_mask, f"{name}.num_bytes": side.num_bytes}


def tokens(arrays: dict[str, NDArray[np.generic]], name: str) -> Tokens:
    return Tokens(arrays[f"{name}.ids"], arrays[f"{name}.loss_mask"], arrays[f"{name}.num_bytes"])  # type: ignore[arg-type]
