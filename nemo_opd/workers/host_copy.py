"""Values of tensors on the host while their memory on a device is free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn

from nemo_opd.distributed.shards import local

_BLOCK_BYTES = 2**28
"""Size of a block of pinned memory, a power of two: PyTorch's allocator takes the next one."""


@dataclass(slots=True)
class _Slot:
    """Room on the host for what a storage holds."""

    storage: UntypedStorage
    pieces: list[Tensor]
    """Consecutive bytes, in one or more blocks."""
    is_fixed: bool
    """Nothing trains it, so that the host's copy stays right."""
    has_values: bool = False


class HostCopy:
    """The values of tensors while their memory on a device is free, in pinned memory that is allocated once.

    Storages are emptied and filled again under the tensors, so that views of them stay views: FSDP2's shards, tied
    weights. Copies are queued on the current stream, one for each storage, which a restored tensor is used on; after
    `hold` wait for the stream before others use the host's memory.
    """

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors to the host, parameters that nothing trains only once, and free their memory."""
        tensors = list(tensors)
        storages = storages_of(tensors)
        if [slot.storage._cdata for slot in self._slots] != [storage._cdata for storage in storages]:
            trained = {each._cdata for each in storages_of(t for t in tensors if t.requires_grad or not _is_weight(t))}
            self._slots = _allocate(storages, trained)
        for slot in self._slots:
            if not slot.storage.nbytes():
                continue  # an empty shard, or one that an exhausted device had no room for
            if not (slot.is_fixed and slot.has_values):
                for piece, part in _pairs(slot):
                    piece.copy_(part, non_blocking=True)
                slot.has_values = True
            slot.storage.resize_(0)

    def restore(self) -> None:
        """Allocate and fill the memory of all that is held."""
        for slot in self._slots:
            if slot.pieces:
                slot.storage.resize_(sum(map(len, slot.pieces)))
                for piece, part in _pairs(slot):
                    part.copy_(piece, non_blocking=True)


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def storages_of(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the storages of tensors, each once."""
    found = (local(tensor.detach()).untyped_storage() for tensor in tensors)
    return list({storage._cdata: storage for storage in found}.values())


def _pairs(slot: _Slot) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the host's pieces with the same bytes of the storage."""
    whole = torch.empty(0, dtype=torch.uint8, device=slot.storage.device).set_(slot.storage)
    return zip(slot.pieces, whole.split([len(piece) for piece in slot.pieces]), strict=True)


def _allocate(storages: Sequence[UntypedStorage], trained: set[int]) -> list[_Slot]:
    """Return a slot for each storage, one after the other in blocks, of which the last is as large as needed."""
    total = sum(storage.nbytes() for storage in storages)
    is_pinned = any(storage.device.type == "cuda" for storage in storages)
    sizes = [_BLOCK_BYTES] * (total // _BLOCK_BYTES) + [total % _BLOCK_BYTES]
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for size in sizes]
    slots = []
    for storage in storages:
        pieces: list[Tensor] = []
        while (left := storage.nbytes() - sum(map(len, pieces))) > 0:
            pieces.append(blocks[0][:left])
            blocks[0] = blocks[0][left:]
            if not len(blocks[0]):
                blocks.pop(0)
        slots.append(_Slot(storage, pieces, storage._cdata not in trained))
    return slots
