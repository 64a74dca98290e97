"""Output of a cache or of servers in the place of a model that is called (methods.md §9.1)."""

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

from nemo_opd.errors import DataError
from nemo_opd.files import write_atomically
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.packed import PackedLogits, Packing
from nemo_opd.logits.sparse import SparseLayout, SparseLogits
from nemo_opd.teacher_cache.manifest import CacheManifest
from nemo_opd.teacher_cache.reader import CacheReader
from nemo_opd.teacher_cache.shard import Segment, id_bytes

_HEAD = "head.safetensors"
_CHECKSUM = "checksum"
"""Key in the metadata of that file."""


def sparse_layout(manifest: CacheManifest) -> SparseLayout:
    """Return the layout of a cache's rows of likeliest tokens. Raises ConfigError for numbers that cannot be."""
    size = manifest.vocab_size
    return SparseLayout(manifest.top_k, size, manifest.value_bytes, id_bytes(size))


def save_head(folder: Path, head: Head) -> None:
    """Write the head of a cache of hidden states. Raises StorageError."""
    numbers = torch.tensor([head.scale, head.soft_cap or 0.0], dtype=torch.float64)
    tensors = {"weight": head.weight.detach().cpu().contiguous(), "numbers": numbers}
    if head.bias is not None:
        tensors["bias"] = head.bias.detach().cpu().contiguous()
    write_atomically(folder / _HEAD, save(tensors, {_CHECKSUM: _checksum(tensors)}))


def lacks_head(reader: CacheReader) -> bool:
    """Return whether a cache has hidden states, and not the head as it was written, without which they say nothing."""
    try:
        require_head(reader)
    except DataError:
        return True
    return False


def require_head(reader: CacheReader) -> None:
    """Raise DataError where a cache has hidden states, and its head is missing or damaged."""
    if reader.manifest.form == "hidden_states":
        load_head(reader.folder, "cpu")


def load_head(folder: Path, device: str) -> Head:
    """Read the head. Raises DataError where it is missing or damaged."""
    path = folder / _HEAD
    way_out = "run nemo-opd cache build again, which writes it anew"
    try:
        with safe_open(path, framework="pt") as file:
            written = (file.metadata() or {}).get(_CHECKSUM)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read ({error}); {way_out}") from error
    if written != _checksum(tensors):
        raise DataError(f"{path} is damaged (its bytes are not as written); {way_out}")
    scale, soft_cap = tensors.pop("numbers").tolist()
    weight, bias = (None if (each := tensors.get(name)) is None else each.to(device) for name in ("weight", "bias"))
    assert weight is not None
    return Head(weight, bias, scale, soft_cap or None)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].view(torch.uint8).numpy().data, zlib.crc32(name.encode(), found))
    return str(found)


class Answers(Protocol):
    """Output of a teacher for sequences of its tokens, from a cache or servers."""

    def segments(self, sequences: Sequence[NDArray[np.integer[Any]]]) -> Iterable[Segment]:
        """Return what is known of each sequence, in order. Raises an OPDError where it is not known."""


class StoredOutput(ABC):
    """Rows of a cache or of servers, by the ids that the teacher reads; called as a model is (`Headless`)."""

    reads_packed = True
    rotary = None
    columns: range

    def __init__(self, answers: Answers, device: str) -> None:
        self._answers, self._device = answers, device

    def num_positions(self, packing: Packing) -> int:
        """Return the positions that are read of these sequences."""
        return len(packing.tokens)

    def _rows(self, ids: Tensor, packing: Packing, num_bytes: int) -> Tensor:
        """Return the bytes of each token of sequences [B, S], uint8 [N, num_bytes], on the device.

        They are copied once, of a cache from the mapped file. Raises what `Answers.segments` does. Of a sequence of one
        token nothing is asked: it has none to predict.
        """
        every = ids.cpu().numpy()
        made = np.zeros((len(packing.tokens), num_bytes), np.uint8)
        own = np.split(made, np.cumsum(packing.lengths)[:-1])
        asked = [row for row, length in enumerate(packing.lengths) if length > 1]
        segments = self._answers.segments([every[row, : packing.lengths[row]] for row in asked])
        for row, segment in zip(asked, segments, strict=True):
            self._put(own[row], segment)
        return torch.from_numpy(made).to(self._device)

    @abstractmethod
    def _put(self, made: NDArray[np.uint8], segment: Segment) -> None:
        """Copy a segment's rows."""


class StoredHiddenStates(StoredOutput):
    """Hidden states, and the head that makes logits of them."""

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

    def whole(self, made: HeadLogits, packing: Packing) -> PackedLogits:
        """Return the logits [B, S, W]."""
        return PackedLogits(made, packing.places)

    def _put(self, made: NDArray[np.uint8], segment: Segment) -> None:
        made[:] = segment.rows


class StoredTopK(StoredOutput):
    """The likeliest tokens of each position."""

    def __init__(self, answers: Answers, layout: SparseLayout, device: str) -> None:
        super().__init__(answers, device)
        self.layout = layout
        self.columns = range(layout.vocab_size)

    def __call__(self, ids: Tensor, packing: Packing) -> SparseLogits:
        """Map ids [B, S] to the logits of their tokens, [B, S, W] and one column more. Raises DataError."""
        return SparseLogits(self._rows(ids, packing, self.layout.handed_bytes), self.layout, packing.places)

    def whole(self, made: SparseLogits, packing: Packing) -> SparseLogits:
        """Return the same."""
        return made

    def _put(self, made: NDArray[np.uint8], segment: Segment) -> None:
        stored = self.layout.row_bytes
        made[:, :stored] = segment.rows
        made[:-1, stored:] = segment.tokens[1:]
        made[-1, stored:] = 0xFF  # no token


def stored_output(reader: CacheReader, device: str) -> StoredHiddenStates | StoredTopK:
    """Open what a cache stores."""
    if reader.manifest.form == "top_k":
        return StoredTopK(reader, sparse_layout(reader.manifest), device)
    return StoredHiddenStates(reader, device)
