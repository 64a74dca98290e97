"""Writing of shards by several workers. An unfinished shard of a killed worker is discarded."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nemo_opd.errors import EndpointError
from nemo_opd.files import remove_abandoned
from nemo_opd.teacher_cache.reader import SHARDS
from nemo_opd.teacher_cache.shard import SUFFIX, Bytes, Segment, encoded_ids, id_bytes, key_of, write_shard

SHARD_BYTES = 256 * 2**20
"""Shards are written at this size. A killed worker loses no more than this; writing needs twice as much memory."""


class CacheWriter:
    """A writer of new shards in a cache's folder. Several writers may use the folder at the same time."""

    def __init__(self, folder: Path, vocab_size: int, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._id_bytes, self._shard_bytes = folder / SHARDS, id_bytes(vocab_size), shard_bytes
        self._segments: list[tuple[bytes, Segment]] = []
        self._size = 0

    def add(self, ids: NDArray[np.integer[Any]], rows: Bytes) -> None:
        """Add a segment: ids [N] and rows [N, R]. Raises StorageError if a full shard cannot be written."""
        segment = Segment(encoded_ids(ids, self._id_bytes), rows)
        self._segments.append((key_of(ids), segment))
        self._size += segment.tokens.nbytes + segment.rows.nbytes
        if self._size >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the added segments as a shard. Raises StorageError."""
        if self._segments:
            write_shard(self._folder / f"{uuid.uuid4().hex}{SUFFIX}", self._segments)
        self._segments, self._size = [], 0

    def __enter__(self) -> Self:
        """Remove unfinished files of killed writers."""
        for folder in (self._folder.parent, self._folder):
            remove_abandoned(folder, f"*{SUFFIX}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the remaining segments, also if the worker was interrupted or a server failed between two segments."""
        if kind is None or issubclass(kind, KeyboardInterrupt | EndpointError):
            self.flush()
