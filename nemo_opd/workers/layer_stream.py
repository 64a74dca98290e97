"""Decoder layers that are copied to the device one at a time, for models larger than its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from nemo_opd.models.decoder_layers import decoder_layers
from nemo_opd.workers.host_copy import HostCopy


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
