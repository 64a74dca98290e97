"""Teacher output from a cache or servers, with the interface of a model (methods.md §9.1)."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nemo_opd.config.teacher import Endpoint
from nemo_opd.errors import DataError
from nemo_opd.files import write_atomically
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import SparseLayout, SparseLogits
from nemo_opd.logits.sources import PackedLogits, Packing
from nemo_opd.teacher_cache.reader import CacheReader
from nemo_opd.teacher_cache.shard import CacheManifest, Segment, id_bytes

_HEAD = "head.safetensors"
_CHECKSUM = "checksum"
"""Key in the head file's metadata."""


def stored_output(reader: CacheReader, device: str) -> StoredHiddenStates | StoredTopK:
    """Open a cache's output in the form that it stores."""
    if reader.manifest.form == "top_k":
        return StoredTopK(reader, sparse_layout(reader.manifest), device)
    return StoredHiddenStates(reader, device)


class Answers(Protocol):
    """Source of a teacher's output for sequences of its tokens: a cache or servers."""

    def segments(self, sequences: Sequence[NDArray[np.integer[Any]]]) -> Iterable[Segment]:
        """Return the output for each sequence, in order. Raises an OPDError if it is not available."""


class _StoredOutput(ABC):
    """Rows from a cache or servers, looked up by the teacher's ids; called like a model (`HiddenStateModel`)."""

    reads_packed = True
    rotary = None
    columns: range

    def __init__(self, answers: Answers, device: str) -> None:
        self._answers, self._device = answers, device

    def num_positions(self, packing: Packing) -> int:
        """Return the number of positions that are read for these sequences."""
        return len(packing.tokens)

    def _rows(self, ids: Tensor, packing: Packing, num_bytes: int) -> Tensor:
        """Return the bytes of each token of sequences [B, S], uint8 [N, num_bytes], on the device.

        They are copied once, from the mapped file if they are cached. Sequences of one token predict nothing and are
        not looked up. Raises what `Answers.segments` does.
        """
        host_ids = ids.cpu().numpy()
        rows = np.zeros((len(packing.tokens), num_bytes), np.uint8)
        sequence_rows = np.split(rows, np.cumsum(packing.lengths)[:-1])
        looked_up = [i for i, length in enumerate(packing.lengths) if length > 1]
        segments = self._answers.segments([host_ids[i, : packing.lengths[i]] for i in looked_up])
        for i, segment in zip(looked_up, segments, strict=True):
            self._copy_rows(sequence_rows[i], segment)
        return torch.from_numpy(rows).to(self._device)

    @abstractmethod
    def _copy_rows(self, target: NDArray[np.uint8], segment: Segment) -> None:
        """Copy a segment's rows to `target`, [tokens, num_bytes]."""


class StoredHiddenStates(_StoredOutput):
    """Stored hidden states, and the head that computes logits from them."""

    def __init__(self, reader: CacheReader, device: str) -> None:
        """Load the head."""
        super().__init__(reader, device)
        self.dtype: torch.dtype = getattr(torch, reader.manifest.dtype)
        self.hidden_size = reader.manifest.hidden_size
        self._head = load_head(reader.folder, device)
        self.columns = range(len(self._head.weight))

    def __call__(self, ids: Tensor, packing: Packing) -> HeadLogits:
        """Map ids [B, S] to logits [1, N, W] of their tokens. Raises DataError."""
        rows = self._rows(ids, packing, self.hidden_size * self.dtype.itemsize)
        return HeadLogits(rows.view(self.dtype).unsqueeze(0), self._head)

    def whole(self, logits: HeadLogits, packing: Packing) -> PackedLogits:
        """Return the logits [B, S, W]."""
        return PackedLogits(logits, packing.places)

    def _copy_rows(self, target: NDArray[np.uint8], segment: Segment) -> None:
        target[:] = segment.rows


class StoredTopK(_StoredOutput):
    """Likeliest tokens of each position, from a cache or, for a served teacher, requested when they are read."""

    def __init__(self, answers: Answers, layout: SparseLayout, device: str) -> None:
        super().__init__(answers, device)
        self.layout = layout
        self.columns = range(layout.vocab_size)

    def __call__(self, ids: Tensor, packing: Packing) -> SparseLogits:
        """Map ids [B, S] to logits [B, S, W], with an additional column if truncated. Raises DataError."""
        return SparseLogits(self._rows(ids, packing, self.layout.handed_bytes), self.layout, packing.places)

    def whole(self, logits: SparseLogits, packing: Packing) -> SparseLogits:
        """Return the logits unchanged."""
        return logits

    def _copy_rows(self, target: NDArray[np.uint8], segment: Segment) -> None:
        row_bytes = self.layout.row_bytes
        target[:, :row_bytes] = segment.rows
        target[:-1, row_bytes:] = segment.tokens[1:]
        target[-1, row_bytes:] = 0xFF  # no token


def sparse_layout(manifest: CacheManifest) -> SparseLayout:
    """Return the layout of a cache's rows of likeliest tokens. Raises ConfigError for impossible numbers."""
    size = manifest.vocab_size
    return SparseLayout(manifest.top_k, size, manifest.value_bytes, id_bytes(size))


def served_layout(endpoint: Endpoint, vocab_size: int) -> SparseLayout:
    """Return the layout of rows from servers."""
    return SparseLayout(min(endpoint.logprobs, vocab_size), vocab_size, 4, id_bytes(vocab_size))


def save_head(folder: Path, head: Head) -> None:
    """Write the head of a cache of hidden states. Raises StorageError."""
    numbers = torch.tensor([head.scale, head.soft_cap or 0.0], dtype=torch.float64)
    tensors = {"weight": head.weight.detach().cpu().contiguous(), "numbers": numbers}
    if head.bias is not None:
        tensors["bias"] = head.bias.detach().cpu().contiguous()
    write_atomically(folder / _HEAD, save(tensors, {_CHECKSUM: _checksum(tensors)}))


def load_head(folder: Path, device: str) -> Head:
    """Read the head. Raises DataError if it is missing or damaged."""
    path = folder / _HEAD
    way_out = "run nemo-opd cache build again, which writes it anew"
    try:
        with safe_open(path, framework="pt") as file:
            checksum = (file.metadata() or {}).get(_CHECKSUM)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read ({error}); {way_out}") from error
    if checksum != _checksum(tensors):
        raise DataError(f"{path} is damaged (its bytes are not as written); {way_out}")
    scale, soft_cap = tensors.pop("numbers").tolist()
    bias = tensors["bias"].to(device) if "bias" in tensors else None
    return Head(tensors["weight"].to(device), bias, scale, soft_cap or None)


def lacks_head(reader: CacheReader) -> bool:
    """Return whether a cache has hidden states without an intact head, which makes them useless."""
    try:
        require_head(reader)
    except DataError:
        return True
    return False


def require_head(reader: CacheReader) -> None:
    """Raise DataError if a cache has hidden states and its head is missing or damaged."""
    if reader.manifest.form == "hidden_states":
        load_head(reader.folder, "cpu")


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].view(torch.uint8).numpy().data, zlib.crc32(name.encode(), checksum))
    return str(checksum)
