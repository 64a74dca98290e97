"""Offload of models to the host between phases, and decoder layers that are copied to the device one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from transformers import PreTrainedModel

from nemo_opd.distributed.collectives import local
from nemo_opd.models.parallelize import free_gathered
from nemo_opd.models.tensor_plan import decoder_layers

_BLOCK_BYTES = 2**28
"""Size of a pinned memory block; PyTorch's allocator rounds up to a power of two."""


class DeviceOffload:
    """A model and its optimizer state, which are on the device only while in use.

    Parameters and state remain the same tensor objects while their values are on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str,
        *,
        offload: bool,
        empties_cache: bool,
        optimizer: Optimizer | None = None,
        stream: LayerStream | None = None,
    ) -> None:
        """Store the arguments.

        offload: move the model to the host between uses (no effect on CPU); it may start on the host. empties_cache:
        release PyTorch's cached device memory after use, for other processes. stream: brings the layers while the
        model is in use; needs `offload`.
        """
        self._model, self._optimizer, self._device = model, optimizer, device
        self._offload, self._empties_cache, self._stream = offload, empties_cache, stream
        self._moves = offload and device == "cuda"
        self._has_arrived = False
        self._parameters, self._state = HostCopy(), HostCopy()

    @contextmanager
    def use(self, *, optimizer: bool = False) -> Iterator[None]:
        """Keep the model on the device inside the context; with `optimizer`, also the optimizer state."""
        try:
            if self._moves:
                self._to_device(optimizer)
            yield
        finally:
            if self._offload:
                free_gathered(self._model)
            if self._moves:
                self._to_host(optimizer)
            if self._empties_cache:
                torch.cuda.empty_cache()

    def _to_device(self, optimizer: bool) -> None:
        if not self._has_arrived:
            if self._stream is None:
                self._model.to(self._device)
            else:
                self._stream.settle()
            self._has_arrived = True
        self._parameters.restore()
        if optimizer:
            self._state.restore()

    def _to_host(self, optimizer: bool) -> None:
        if self._stream is not None:
            self._stream.free_prefetched()
        self._parameters.hold(self._model.parameters() if self._stream is None else self._stream.outer_parameters())
        if optimizer and self._optimizer is not None:
            self._state.hold(_moments(self._optimizer))
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Free the device memory. The model must not be used afterwards."""
        free_gathered(self._model)
        for storage in storages_of(self._model.parameters()) if self._device == "cuda" else ():
            storage.resize_(0)


def _moments(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the state's tensors except AdamW's scalar step counters, which are not moved."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)


class LayerStream:
    """Streamer of a model's frozen layers; each is on the device from the start of the previous layer to its own end.

    Copies run on a separate stream, so that a layer's weights arrive while the previous layer computes. A copy waits
    for the layers whose freed memory it may reuse.
    """

    def __init__(self, model: PreTrainedModel, device: str) -> None:
        """Register the hooks. The model must be on the host, and each forward pass must run all layers in order."""
        self._model, self._device = model, device
        self._layers = decoder_layers(model)
        self._copies = [HostCopy() for _ in self._layers]
        self._arriving: dict[int, torch.cuda.Event | None] = {}
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        for index, layer in enumerate(self._layers):
            # Before FSDP2's hook, which gathers the weights that arrive here.
            layer.register_forward_pre_hook(partial(self._enter, index), prepend=True)
            layer.register_forward_hook(partial(self._free, index), always_call=True)

    def outer_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters outside the layers."""
        in_layers = {id(parameter) for layer in self._layers for parameter in layer.parameters()}
        yield from (parameter for parameter in self._model.parameters() if id(parameter) not in in_layers)

    def settle(self) -> None:
        """Move the layers to pinned host memory, one by one through the device, and outer modules to the device.

        Collective if FSDP2 shards the model.
        """
        for layer, copy in zip(self._layers, self._copies, strict=True):
            layer.to(self._device)
            if isinstance(layer, FSDPModule):  # its lazy initialization looks at the shards on the device
                layer.unshard()
                layer.reshard()
            copy.hold(layer.parameters())
        in_layers = {module for layer in self._layers for module in layer.modules()}
        for module in reversed(list(self._model.modules())):
            if module not in in_layers:
                module._apply(lambda tensor: tensor.to(self._device), recurse=False)

    def free_prefetched(self) -> None:
        """Free layers that were prefetched for a pass that does not come."""
        for index in list(self._arriving):
            self._free(index)

    def _enter(self, index: int, *_: Any) -> None:
        self._prefetch(index)
        if (event := self._arriving[index]) is not None:
            event.synchronize()  # on the host, since FSDP2 gathers on streams that do not wait for the current one
        self._prefetch((index + 1) % len(self._layers))

    def _free(self, index: int, *_: Any) -> None:
        if index in self._arriving:
            del self._arriving[index]
            self._copies[index].hold(self._layers[index].parameters())

    def _prefetch(self, index: int) -> None:
        if index not in self._arriving:
            with self._copy_stream():
                self._copies[index].restore()
                self._arriving[index] = None if self._stream is None else self._stream.record_event()

    def _copy_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        # The allocator reuses freed memory for the next copy while kernels that read it may still be queued.
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)


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


@dataclass(slots=True)
class _Slot:
    """Host memory for the contents of one storage."""

    storage: UntypedStorage
    pieces: list[Tensor]
    """Host memory of consecutive bytes of the storage, in one or more blocks."""
    is_fixed: bool
    """Whether the storage is never trained, so that the host copy stays valid."""
    has_values: bool = False


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
