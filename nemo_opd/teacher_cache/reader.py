"""Reader and writer of a teacher cache: lookup of segments by the teacher's token ids, and writing of shards by several
workers.
"""

import json
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nemo_opd.errors import DataError, EndpointError
from nemo_opd.files import remove_abandoned
from nemo_opd.rotary import RotaryLimit, rotary_limit
from nemo_opd.teacher_cache.shard import (
    ASK_MISSING,
    KEY_BYTES,
    OPENING,
    SUFFIX,
    Bytes,
    CacheManifest,
    Segment,
    Shard,
    encoded_ids,
    id_bytes,
    key_of,
    opening_of,
    read_manifest,
    write_shard,
)

SHARDS = "shards"
_CONFIG = "config.json"
_MAX_TABLES = 64

SHARD_BYTES = 256 * 2**20
"""Shards are written at this size. A killed worker loses no more than this; writing needs twice as much memory."""


class CacheReader:
    """All complete shards of a cache, memory-mapped. Processes share the pages that they read."""

    def __init__(self, folder: str | Path) -> None:
        """Open the current shards. Raises DataError if the folder is not a cache or a shard is damaged."""
        self.folder = Path(folder)
        self.manifest: CacheManifest = read_manifest(folder)
        self.rotary = _rotary_limit(self.folder)
        self.shards = [Shard(path) for path in shard_files(self.folder)]
        keys = [shard.keys for shard in self.shards]
        all_keys = np.concatenate([np.zeros((0, KEY_BYTES), np.uint8), *keys]).view(f"V{KEY_BYTES}").reshape(-1)
        sizes = [len(shard) for shard in self.shards]
        # Sorted by their first halves, which hardly ever collide.
        halves = all_keys.view("<u8").reshape(-1, 2)[:, 0]
        order = np.argsort(halves, kind="stable")
        self._keys, self._halves = all_keys[order], halves[order]
        self._shard = np.repeat(np.arange(len(sizes)), sizes)[order]
        self._number = np.concatenate([np.zeros(0, np.int64), *map(np.arange, sizes)]).astype(np.int64)[order]
        openings = np.concatenate([np.zeros(0, np.uint64), *(shard.openings for shard in self.shards)])[order]
        self._by_opening = np.argsort(openings, kind="stable")
        self._openings = openings[self._by_opening]
        # All conversations may have the same opening, so a cached table tells them apart.
        self._cached_table = lru_cache(_MAX_TABLES)(self._places_by_beginning)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return any(True for _ in self._places(key))

    def has(self, ids: NDArray[np.integer[Any]]) -> bool:
        """Return whether `segment` returns an undamaged segment."""
        try:
            self.segment(ids)
        except DataError:
            return False
        return True

    def segment(self, ids: NDArray[np.integer[Any]]) -> Segment:
        """Return the segment of a sequence of ids, or the part of a longer one, as views of the mapping.

        A longer sequence must start with `ids` and have the same rotary factors in the teacher. Raises DataError with
        the segment's key if it is missing, or if all its copies are damaged.
        """
        key = key_of(ids)
        stored, damage = self._stored(key)
        if stored is not None:
            return stored
        if (longer := self._longer_segment(ids)) is not None:
            return longer.part(len(ids))
        raise damage or self._missing(key, ids)

    def segments(self, sequences: Iterable[NDArray[np.integer[Any]]]) -> Iterator[Segment]:
        """Yield the segment of each sequence."""
        return map(self.segment, sequences)

    def _segment(self, place: int) -> Segment:
        return self.shards[self._shard[place]].segment(int(self._number[place]))

    def _longer_segment(self, ids: NDArray[np.integer[Any]]) -> Segment | None:
        """Return a segment that starts with `ids`, such as one stored for a student that reads more of the text."""
        if len(ids) < OPENING:
            return None
        encoded = encoded_ids(ids, id_bytes(self.manifest.vocab_size))
        length = 2 ** (len(ids).bit_length() - 1)
        for place in self._cached_table(opening_of(ids), length).get(hash(encoded[:length].tobytes()), ()):
            tokens = self._tokens(place)
            if self.rotary is not None and not self.rotary.reads_alike(len(ids), len(tokens)):
                continue
            if np.array_equal(tokens[: len(ids)], encoded):
                with suppress(DataError):  # there may be another copy
                    return self._segment(place)
        return None

    def _places_by_beginning(self, opening: int, length: int) -> dict[int, list[int]]:
        """Return hash of the first `length` tokens → places, for segments with this opening."""
        begin, end = (int(np.searchsorted(self._openings, np.uint64(opening), side)) for side in ("left", "right"))
        places: dict[int, list[int]] = defaultdict(list)
        for place in self._by_opening[begin:end].tolist():
            if len(tokens := self._tokens(place)) >= length:
                places[hash(tokens[:length].tobytes())].append(place)
        return places

    def _tokens(self, place: int) -> Bytes:
        return self.shards[self._shard[place]].tokens(int(self._number[place]))

    def each(self) -> Iterator[Segment]:
        """Yield all segments, shard by shard. Raises DataError if all copies of a segment are damaged."""
        for shard in self.shards:
            for number in range(len(shard)):
                stored, damage = self._stored(shard.keys[number].tobytes())
                if stored is None:
                    assert damage is not None, "the key is stored"
                    raise damage
                yield stored

    def _stored(self, key: bytes) -> tuple[Segment | None, DataError | None]:
        """Return the first undamaged copy of a segment, or None and the damage of its last copy."""
        damage = None
        for place in self._places(key):
            try:
                return self._segment(place), None
            except DataError as error:
                damage = error
        return None, damage

    def _places(self, key: bytes) -> Iterator[int]:
        """Yield the places of a segment. There are several if it was stored again because a copy is damaged."""
        full_key = np.frombuffer(key, f"V{KEY_BYTES}")[0]
        half = np.frombuffer(key, "<u8")[0]
        place = int(np.searchsorted(self._halves, half))
        while place < len(self._keys) and self._halves[place] == half:
            if self._keys[place] == full_key:
                yield place
            place += 1

    def _missing(self, key: bytes, ids: NDArray[np.integer[Any]]) -> DataError:
        rotary = ""
        if self.rotary is not None:
            rotary = f", or from texts of more than {self.rotary.length} tokens, which have other rotary factors"
        return DataError(
            f"{self.folder} holds no answers of {self.manifest.teacher} to segment {key.hex()}, which has {len(ids)} "
            f"of its tokens and starts with the ids {ids[:8].tolist()}; the cache was built from other texts, or with "
            f"other data.packing, train.max_length, data.append_eos, chat template or context{rotary}. To add missing "
            f"answers, set {ASK_MISSING}, or run nemo-opd cache build with this run's settings as --config and the "
            "teacher as --model"
        )


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


def _rotary_limit(folder: Path) -> RotaryLimit | None:
    """Return the limit of the teacher's rotary factors, or None if its configuration is unknown, as with servers.

    Raises DataError for an unreadable configuration.
    """
    path = folder / _CONFIG
    try:
        return rotary_limit(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} cannot be read ({error}); build the cache again") from error


def shard_files(folder: Path) -> list[Path]:
    """Return the complete shards of a cache. Unfinished shards have other names."""
    return sorted(path for path in (folder / SHARDS).glob(f"*{SUFFIX}") if not path.name.startswith("."))
