"""A teacher cache's manifest and its shards: files with some of its segments, written atomically and memory-mapped
(methods.md §9.1).

A shard is a safetensors file, so that other programs can read it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import TypeAdapter
from safetensors.numpy import save

from nemo_opd.errors import DataError
from nemo_opd.files import load_yaml, write_atomically

KEY_BYTES = 16
OPENING = 16
"""Number of first tokens whose hash finds segments that start with a sequence."""
SUFFIX = ".safetensors"
_INDEX = ("keys", "openings", "begins", "checksums")
"""Tensors that are read when a shard is opened."""
_WAY_OUT = "remove the file and run nemo-opd cache build again, which adds its segments"
ASK_MISSING = "on_missing: ask"
"""The setting in messages; a run's message writes it with the teacher's number."""
_ASK_AGAIN = f"run nemo-opd cache build again, which replaces it, or set {ASK_MISSING}"
_DTYPES = {"U8": np.uint8, "U32": np.uint32, "U64": np.uint64, "I64": np.int64}
_MANIFEST_VERSION = 1
"""Increased when the same manifest would describe other bytes."""
MANIFEST = "cache.yaml"
_BUILD = "nemo-opd cache build"
_MAY_DIFFER = ("teacher", "positions")
"""Fields that do not affect the stored numbers."""
_FINGERPRINT_LENGTH = 64
"""Characters of a SHA-256 hash."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Segment:
    """A teacher's answers to one sequence of N tokens."""

    tokens: Bytes
    """[N, b]: ids as encoded by `encoded_ids`."""
    rows: Bytes
    """[N, R]: row i is about the token after token i."""

    def part(self, length: int) -> Segment:
        """Return the first `length` tokens, whose rows do not depend on later tokens."""
        return Segment(self.tokens[:length], self.rows[:length])

    @property
    def checksum(self) -> int:
        tokens, rows = (np.ascontiguousarray(side).data for side in (self.tokens, self.rows))
        return zlib.crc32(rows, zlib.crc32(tokens))


class Shard:
    """A memory-mapped shard."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its index. Raises DataError if the file is damaged."""
        self.path = path
        try:
            header, begin = _header(path)
            tensors = {name: _mapped(path, entry, begin) for name, entry in header.items() if name != "__metadata__"}
            self.keys, self.openings, self.begins, self._checksums = (np.array(tensors[name]) for name in _INDEX)
            self._tokens, self._rows = tensors["tokens"], tensors["rows"]
            checksum = zlib.crc32(b"".join(tensors[name].tobytes() for name in _INDEX))
            is_intact = str(checksum) == header["__metadata__"]["index_checksum"]
            self._check_shapes()
        except Exception as error:  # the file may hold anything
            raise DataError(f"{path} is damaged ({error}); {_WAY_OUT}") from error
        if not is_intact:
            raise DataError(f"{path} is damaged (its index was changed); {_WAY_OUT}")

    def _check_shapes(self) -> None:
        """Raise ValueError if the tensors do not fit each other."""
        n, num_tokens = len(self.keys), len(self._tokens)
        expected = {
            "keys": (self.keys, (n, KEY_BYTES), np.uint8),
            "openings": (self.openings, (n,), np.uint64),
            "begins": (self.begins, (n + 1,), np.int64),
            "checksums": (self._checksums, (n,), np.uint32),
            "tokens": (self._tokens, (num_tokens, self._tokens.shape[-1]), np.uint8),
            "rows": (self._rows, (num_tokens, self._rows.shape[-1]), np.uint8),
        }
        for name, (tensor, shape, dtype) in expected.items():
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(f"{name} has the shape {list(tensor.shape)} and the type {tensor.dtype}")
        if self._tokens.shape[-1] not in (2, 3):
            raise ValueError(f"its ids have {self._tokens.shape[-1]} bytes")
        if self.begins[0] or self.begins[-1] != num_tokens or np.any(self.begins[1:] < self.begins[:-1]):
            raise ValueError("its segments are not in order")

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_tokens(self) -> int:
        return int(self.begins[-1])

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    def segment(self, number: int) -> Segment:
        """Return a segment as views of the mapping. Raises DataError if it does not match its checksum."""
        segment = Segment(self.tokens(number), self._rows[self._range(number)])
        if segment.checksum != self._checksums[number]:
            key = self.keys[number].tobytes().hex()
            raise DataError(f"{self.path}: segment {key} is damaged (its bytes were changed); {_ASK_AGAIN}")
        return segment

    def tokens(self, number: int) -> Bytes:
        """Return a segment's ids [N, b] as a view of the mapping, without checking them."""
        return self._tokens[self._range(number)]

    def _range(self, number: int) -> slice:
        return slice(self.begins[number], self.begins[number + 1])


def write_shard(path: Path, segments: Sequence[tuple[bytes, Segment]]) -> None:
    """Write (key, segment) pairs atomically, synced to disk. Raises StorageError."""
    lengths = [len(segment.tokens) for _, segment in segments]
    tensors: dict[str, NDArray[Any]] = {
        "keys": np.frombuffer(b"".join(key for key, _ in segments), np.uint8).reshape(-1, KEY_BYTES),
        "openings": np.array([opening_of(decoded_ids(segment.tokens[:OPENING])) for _, segment in segments], np.uint64),
        "begins": np.cumsum([0, *lengths], dtype=np.int64),
        "checksums": np.array([segment.checksum for _, segment in segments], np.uint32),
        "tokens": np.concatenate([segment.tokens for _, segment in segments]),
        "rows": np.concatenate([segment.rows for _, segment in segments]),
    }
    index = zlib.crc32(b"".join(tensors[name].tobytes() for name in _INDEX))
    write_atomically(path, save(tensors, {"index_checksum": str(index)}))


@dataclass(frozen=True, slots=True)
class CacheManifest:
    """Format and origin of a cache: everything that its numbers depend on, except the texts."""

    form: Literal["top_k", "hidden_states"]
    teacher: str
    """Name of the model, for messages."""
    weights: str
    """Fingerprint of the teacher's weights and configuration."""
    tokenizer: str
    """Fingerprint of its tokens' bytes."""
    template: str
    """Fingerprint of its chat template and the template's arguments, which do not matter for plain texts."""
    vocab_size: int
    """W: number of ids that both tokenizer and model have."""
    dtype: str
    """Precision of the teacher's computation and of hidden states."""
    top_k: int = 0
    """form=top_k: tokens stored per position."""
    value_bytes: int = 0
    """form=top_k: bytes of a log-probability."""
    handoff: str = "hidden_states"
    """`handoff.type` of the teacher's answers. With `logits`, they were rounded to `dtype`."""
    hidden_size: int = 0
    """form=hidden_states: E."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    is_served: bool = False
    """Whether servers answered. If so, `weights` is a fingerprint of the model's name, and entropies are unknown."""
    positions: int | None = None
    """is_served: longest sequence that the servers accepted, if they reported one."""
    version: int = _MANIFEST_VERSION


_MANIFEST = TypeAdapter(CacheManifest)


def read_manifest(folder: str | Path) -> CacheManifest:
    """Read a cache's manifest. Raises DataError if it is missing, unreadable or of another version."""
    path = Path(folder) / MANIFEST
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
        CacheManifest(**content)  # refuses unknown keys
        manifest = _MANIFEST.validate_python(content)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{folder} is not a teacher cache: it has no {MANIFEST}; build one with {_BUILD}") from error
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read ({reason}); build the cache again with {_BUILD}") from error
    if manifest.version != _MANIFEST_VERSION:
        raise DataError(
            f"{path} has version {manifest.version}, but this program reads version {_MANIFEST_VERSION}; build the "
            "cache again"
        )
    return manifest


def require_cache(folder: str, key: str) -> CacheManifest:
    """Read a cache's manifest. Raises DataError, naming `key`, if it cannot be read."""
    try:
        return read_manifest(folder)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def has_manifest(folder: Path) -> bool:
    """Return whether a folder is a cache, by its manifest."""
    return (folder / MANIFEST).is_file()


def write_manifest(folder: Path, manifest: CacheManifest) -> None:
    """Write the manifest of a new cache, or compare it with the existing one.

    Raises DataError with the differences if the existing cache is of another teacher or format, and StorageError.
    """
    if not has_manifest(folder):
        write_atomically(folder / MANIFEST, yaml.safe_dump(asdict(manifest), sort_keys=False).encode())
    existing, new = asdict(read_manifest(folder)), asdict(manifest)
    differences = [
        f"{name} is {_abbreviated(existing[name])} there and {_abbreviated(new[name])} here"
        for name in new
        if name not in _MAY_DIFFER and existing[name] != new[name]
    ]
    if differences:
        raise DataError(
            f"{folder} is a cache of other answers: {'; '.join(differences)}; name another folder, since a cache "
            "cannot mix teachers or formats"
        )


def _abbreviated(value: object) -> str:
    """Return the value for a message; fingerprints are shortened."""
    text = str(value)
    return f"{text[:12]}…" if len(text) == _FINGERPRINT_LENGTH else text


def key_of(ids: NDArray[np.integer[Any]]) -> bytes:
    """Return the key of a segment: a hash of the teacher's ids."""
    return blake2b(np.ascontiguousarray(ids, dtype="<i4").tobytes(), digest_size=KEY_BYTES).digest()


def opening_of(ids: NDArray[np.integer[Any]]) -> int:
    """Return a hash of the first ids."""
    return int.from_bytes(key_of(ids[:OPENING])[:8], "little")


def id_bytes(vocab_size: int) -> int:
    """Return the bytes per stored id. The largest number they can hold means no id."""
    return 2 if vocab_size < 2**16 else 3


def encoded_ids(ids: NDArray[np.integer[Any]], num_bytes: int) -> Bytes:
    """Encode ids [N], with −1 for no id, as little-endian bytes [N, num_bytes]."""
    return np.ascontiguousarray(ids, dtype="<i4").view(np.uint8).reshape(-1, 4)[:, :num_bytes]


def decoded_ids(stored: Bytes) -> NDArray[np.int32]:
    """Decode bytes [N, b] → int32 [N]."""
    ids = np.zeros((len(stored), 4), np.uint8)
    ids[:, : stored.shape[1]] = stored
    return ids.view("<i4").reshape(-1)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header and the offset of its data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("its header is cut off")
        return json.loads(file.read(length)), 8 + length


def _mapped(path: Path, entry: dict[str, Any], begin: int) -> NDArray[Any]:
    start, stop = entry["data_offsets"]
    if begin + stop > path.stat().st_size:
        raise ValueError("its end is missing")
    shape = tuple(entry["shape"])
    if not stop - start:
        if math.prod(shape):
            raise ValueError("a tensor without bytes has elements")
        return np.zeros(shape, _DTYPES[entry["dtype"]])
    return np.memmap(path, _DTYPES[entry["dtype"]], "r", begin + start, shape)
