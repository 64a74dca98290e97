"""Host copies of tensors whose device memory is freed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn

from nemo_opd.distributed.shards import local

_BLOCK_BYTES = 2**28
"""Size of a pinned memory block; PyTorch's allocator rounds up to a power of two."""


@dataclass(slots=True)
class _Slot:
    """Host memory for the contents of one storage."""

    storage: UntypedStorage
    pieces: list[Tensor]
    """Host memory of consecutive bytes of the storage, in one or more blocks."""
    is_fixed: bool
    """Whether the storage is never trained, so that the host copy stays valid."""
    has_values: bool = False


class HostCopy:
    """Copy of tensors in pinned host memory, allocated once, while their device memory is freed.

    Storages are resized in place, so that views stay views (FSDP2's shards, tied weights). Copies are queued on the
    current stream, one per storage; use restored tensors on the same stream, and synchronize it after `hold` before
    anything else uses the host memory.
    """

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors to the host, frozen parameters only once, and free their device memory."""
        tensors = list(tensors)
        storages = storages_of(tensors)
        if [slot.storage._cdata for slot in self._slots] != [storage._cdata for storage in storages]:
            changing = [t for t in tensors if t.requires_grad or not isinstance(t, nn.Parameter)]
            self._slots = _allocate(storages, {storage._cdata for storage in storages_of(changing)})
        for slot in self._slots:
            if not slot.storage.nbytes():
                continue  # an empty shard, or `restore` ran out of device memory
            if not (slot.is_fixed and slot.has_values):
                for host_bytes, device_bytes in _pairs(slot):
                    host_bytes.copy_(device_bytes, non_blocking=True)
                slot.has_values = True
            slot.storage.resize_(0)

    def restore(self) -> None:
        """Allocate the device memory of all held tensors again and fill it."""
        for slot in self._slots:
            if slot.pieces:
                slot.storage.resize_(sum(map(len, slot.pieces)))
                for host_bytes, device_bytes in _pairs(slot):
                    device_bytes.copy_(host_bytes, non_blocking=True)


def storages_of(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the distinct storages of tensors."""
    storages = (local(tensor.detach()).untyped_storage() for tensor in tensors)
    return list({storage._cdata: storage for storage in storages}.values())


def _pairs(slot: _Slot) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each host piece with the matching bytes of the storage."""
    device_bytes = torch.empty(0, dtype=torch.uint8, device=slot.storage.device).set_(slot.storage)
    return zip(slot.pieces, device_bytes.split([len(piece) for piece in slot.pieces]), strict=True)


def _allocate(storages: Sequence[UntypedStorage], changing: set[int]) -> list[_Slot]:
    """Allocate a slot per storage, back to back in blocks; the last block is only as large as needed."""
    total = sum(storage.nbytes() for storage in storages)
    is_pinned = any(storage.device.type == "cuda" for storage in storages)
    sizes = [_BLOCK_BYTES] * (total // _BLOCK_BYTES) + [total % _BLOCK_BYTES]
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for size in sizes]
    slots = []
    for storage in storages:
        pieces: list[Tensor] = []
        while (missing := storage.nbytes() - sum(map(len, pieces))) > 0:
            pieces.append(blocks[0][:missing])
            blocks[0] = blocks[0][missing:]
            if not len(blocks[0]):
                blocks.pop(0)
        slots.append(_Slot(storage, pieces, is_fixed=storage._cdata not in changing))
    return slots
