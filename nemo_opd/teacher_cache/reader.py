"""Segments of a cache, found by the ids that the teacher would read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_opd.errors import DataError
from nemo_opd.teacher_cache.manifest import CacheManifest, read_manifest
from nemo_opd.teacher_cache.shard import KEY_BYTES, SUFFIX, Segment, Shard, key_of

SHARDS = "shards"


class CacheReader:
    """All complete shards of a cache, mapped. Processes share the pages that they read."""

    def __init__(self, folder: str | Path) -> None:
        """Open the shards that are there now. Raises DataError for a folder that is no cache, or a damaged shard."""
        self.folder = Path(folder)
        self.manifest: CacheManifest = read_manifest(folder)
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

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return self._place(key) is not None

    def segment(self, ids: NDArray[np.integer[Any]]) -> Segment:
        """Return what is stored of a sequence of ids, as views of the mapping.

        Raises DataError, naming the segment, where it is missing or damaged.
        """
        key = key_of(ids)
        if (place := self._place(key)) is None:
            raise self._missing(key, ids)
        return self.shards[self._shard[place]].segment(int(self._number[place]))

    def each(self) -> Iterator[Segment]:
        """Yield all segments, shard by shard. Raises DataError at one that is damaged."""
        for shard in self.shards:
            for number in range(len(shard)):
                yield shard.segment(number)

    def _place(self, key: bytes) -> int | None:
        wanted = np.frombuffer(key, f"V{KEY_BYTES}")[0]
        half = np.frombuffer(key, "<u8")[0]
        place = int(np.searchsorted(self._halves, half))
        while place < len(self._keys) and self._halves[place] == half:
            if self._keys[place] == wanted:
                return place
            place += 1
        return None

    def _missing(self, key: bytes, ids: NDArray[np.integer[Any]]) -> DataError:
        return DataError(
            f"{self.folder} holds no answers of {self.manifest.teacher} to segment {key.hex()}, which has {len(ids)} "
            f"of its tokens and begins with the ids {ids[:8].tolist()}; the cache was built from other texts, or with "
            "other data.packing, train.max_length, data.append_eos or chat template. To add what is missing, run "
            "tools/teacher_cache/build.py with --config of this run's settings and --model of the teacher"
        )


def shard_files(folder: Path) -> list[Path]:
    """Return the complete shards of a cache; one that is being written has another name."""
    return sorted(path for path in (folder / SHARDS).glob(f"*{SUFFIX}") if not path.name.startswith("."))
