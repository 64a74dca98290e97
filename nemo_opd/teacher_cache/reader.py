"""Segments of a cache, found by the ids that the teacher would read."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_opd.errors import DataError
from nemo_opd.rotary import RotaryLimit, rotary_limit
from nemo_opd.teacher_cache.manifest import CacheManifest, read_manifest
from nemo_opd.teacher_cache.shard import (
    KEY_BYTES,
    OPENING,
    SUFFIX,
    Bytes,
    Segment,
    Shard,
    encoded_ids,
    id_bytes,
    key_of,
    opening_of,
)

SHARDS = "shards"
_CONFIG = "config.json"
_KEPT_TABLES = 64


class CacheReader:
    """All complete shards of a cache, mapped. Processes share the pages that they read."""

    def __init__(self, folder: str | Path) -> None:
        """Open the shards that are there now. Raises DataError for a folder that is no cache, or a damaged shard."""
        self.folder = Path(folder)
        self.manifest: CacheManifest = read_manifest(folder)
        self.rotary = _rotary_limit(self.folder)
        self.shards = [Shard(path) for path in shard_files(self.folder)]
        keys = [shard.keys for shard in self.shards]
        every = np.concatenate([np.zeros((0, KEY_BYTES), np.uint8), *keys]).view(f"V{KEY_BYTES}").reshape(-1)
        sizes = [len(shard) for shard in self.shards]
        # Compared by their first half, of which two are hardly ever the same.
        halves = every.view("<u8").reshape(-1, 2)[:, 0]
        order = np.argsort(halves, kind="stable")
        self._keys, self._halves = every[order], halves[order]
        self._shard = np.repeat(np.arange(len(sizes)), sizes)[order]
        self._number = np.concatenate([np.zeros(0, np.int64), *map(np.arange, sizes)]).astype(np.int64)[order]
        openings = np.concatenate([np.zeros(0, np.uint64), *(shard.openings for shard in self.shards)])[order]
        self._by_opening = np.argsort(openings, kind="stable")
        self._openings = openings[self._by_opening]
        # Conversations may all open alike: one table tells them apart, and is made once.
        self._of_beginnings = lru_cache(_KEPT_TABLES)(self._places_by_beginning)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return any(True for _ in self._places(key))

    def has(self, ids: NDArray[np.integer[Any]]) -> bool:
        """Return whether `segment` finds a sequence, undamaged."""
        try:
            self.segment(ids)
        except DataError:
            return False
        return True

    def segment(self, ids: NDArray[np.integer[Any]]) -> Segment:
        """Return what is stored of a sequence of ids, or of one that begins with it, as views of the mapping.

        A longer one counts only if the teacher reads both with the same rotary factors. Raises DataError, naming the
        segment, where it is missing, or damaged wherever it is stored.
        """
        key = key_of(ids)
        stored, damage = self._stored(key)
        if stored is not None:
            return stored
        if (longer := self._beginning_with(ids)) is not None:
            return longer.part(len(ids))
        raise damage or self._missing(key, ids)

    def segments(self, sequences: Iterable[NDArray[np.integer[Any]]]) -> Iterator[Segment]:
        """Yield `segment` of each sequence."""
        return map(self.segment, sequences)

    def _segment(self, place: int) -> Segment:
        return self.shards[self._shard[place]].segment(int(self._number[place]))

    def _beginning_with(self, ids: NDArray[np.integer[Any]]) -> Segment | None:
        """Return a stored segment that begins with a sequence, as where another student reads more of the text."""
        if len(ids) < OPENING:
            return None
        wanted = encoded_ids(ids, id_bytes(self.manifest.vocab_size))
        length = 2 ** (len(ids).bit_length() - 1)
        for place in self._of_beginnings(opening_of(ids), length).get(hash(wanted[:length].tobytes()), ()):
            tokens = self._tokens(place)
            if self.rotary is not None and not self.rotary.reads_alike(len(ids), len(tokens)):
                continue
            if np.array_equal(tokens[: len(ids)], wanted):
                with suppress(DataError):  # it may be stored again
                    return self._segment(place)
        return None

    def _places_by_beginning(self, opening: int, length: int) -> dict[int, list[int]]:
        """Return where segments with an opening are stored, by a hash of their first `length` tokens."""
        begin, end = (int(np.searchsorted(self._openings, np.uint64(opening), side)) for side in ("left", "right"))
        found: dict[int, list[int]] = defaultdict(list)
        for place in self._by_opening[begin:end].tolist():
            if len(tokens := self._tokens(place)) >= length:
                found[hash(tokens[:length].tobytes())].append(place)
        return found

    def _tokens(self, place: int) -> Bytes:
        return self.shards[self._shard[place]].tokens(int(self._number[place]))

    def each(self) -> Iterator[Segment]:
        """Yield all segments, shard by shard. Raises DataError at one that is damaged wherever it is stored."""
        for shard in self.shards:
            for number in range(len(shard)):
                stored, damage = self._stored(shard.keys[number].tobytes())
                if stored is None:
                    assert damage is not None, "it is stored"
                    raise damage
                yield stored

    def _stored(self, key: bytes) -> tuple[Segment | None, DataError | None]:
        """Return a segment from the first place where it is undamaged; else None, and the damage if it is stored."""
        damage = None
        for place in self._places(key):
            try:
                return self._segment(place), None
            except DataError as error:
                damage = error
        return None, damage

    def _places(self, key: bytes) -> Iterator[int]:
        """Yield where a segment is stored: more than once where it was asked about again, since it is damaged."""
        wanted = np.frombuffer(key, f"V{KEY_BYTES}")[0]
        half = np.frombuffer(key, "<u8")[0]
        place = int(np.searchsorted(self._halves, half))
        while place < len(self._keys) and self._halves[place] == half:
            if self._keys[place] == wanted:
                yield place
            place += 1

    def _missing(self, key: bytes, ids: NDArray[np.integer[Any]]) -> DataError:
        cut = ""
        if self.rotary is not None:
            cut = f", or from texts of more than {self.rotary.length} tokens, whose rotary factors are others"
        return DataError(
            f"{self.folder} holds no answers of {self.manifest.teacher} to segment {key.hex()}, which has {len(ids)} "
            f"of its tokens and begins with the ids {ids[:8].tolist()}; the cache was built from other texts, or with "
            f"other data.packing, train.max_length, data.append_eos, chat template or context{cut}. To add what is "
            "missing, write on_missing: ask, or run nemo-opd cache build with --config of this run's settings and with "
            "--model of the teacher"
        )


def _rotary_limit(folder: Path) -> RotaryLimit | None:
    """Return the limit of the teacher's rotary factors; None for servers' answers, which come without configuration.

    Raises DataError for a configuration that cannot be read.
    """
    path = folder / _CONFIG
    try:
        return rotary_limit(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} cannot be read ({error}); build the cache again") from error


def shard_files(folder: Path) -> list[Path]:
    """Return the complete shards of a cache; one that is being written has another name."""
    return sorted(path for path in (folder / SHARDS).glob(f"*{SUFFIX}") if not path.name.startswith("."))
