"""Decoder layers that are on the device one after the other, for a model that is larger than it."""

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
    """The frozen layers of a model, each on the device from the time that the layer before it begins to its own end.

    Copies are queued on a separate stream, so that a layer's weights arrive while the layer before computes. A copy
    waits until the layers whose memory it may be given have been computed.
    """

    def __init__(self, model: PreTrainedModel, device: str) -> None:
        """model: on the host; every forward pass runs all of its layers in order."""
        self._model, self._device = model, device
        self._layers = decoder_layers(model)
        self._copies = [HostCopy() for _ in self._layers]
        self._arriving: dict[int, torch.cuda.Event | None] = {}
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        for index, layer in enumerate(self._layers):
            # Before FSDP2's own hook, which gathers what arrives here.
            layer.register_forward_pre_hook(partial(self._enter, index), prepend=True)
            layer.register_forward_hook(partial(self._leave, index), always_call=True)

    def rest(self) -> Iterator[nn.Parameter]:
        """Yield the parameters outside the layers."""
        in_layers = {id(each) for layer in self._layers for each in layer.parameters()}
        yield from (each for each in self._model.parameters() if id(each) not in in_layers)

    def settle(self) -> None:
        """Move layers to pinned memory of the host, one by one by way of the device, and all else to the device.

        Collective where FSDP2 shards the model.
        """
        for layer, copy in zip(self._layers, self._copies, strict=True):
            layer.to(self._device)
            if isinstance(layer, FSDPModule):  # looks at its shards once, before the first pass
                layer.unshard()
                layer.reshard()
            copy.hold(layer.parameters())
        in_layers = {module for layer in self._layers for module in layer.modules()}
        for module in reversed(list(self._model.modules())):
            if module not in in_layers:
                module._apply(lambda tensor: tensor.to(self._device), recurse=False)

    def leave(self) -> None:
        """Free what has arrived for a pass that does not come."""
        for index in list(self._arriving):
            self._leave(index)

    def _enter(self, index: int, *_: Any) -> None:
        self._bring(index)
        if (event := self._arriving[index]) is not None:
            event.synchronize()  # on the host, since FSDP2 gathers on streams that do not wait for the current one
        self._bring((index + 1) % len(self._layers))

    def _leave(self, index: int, *_: Any) -> None:
        if index in self._arriving:
            del self._arriving[index]
            self._copies[index].hold(self._layers[index].parameters())

    def _bring(self, index: int) -> None:
        if index not in self._arriving:
            with self._copying():
                self._copies[index].restore()
                self._arriving[index] = None if self._stream is None else self._stream.record_event()

    def _copying(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        # Memory that has been freed is given to the next copy at once, while kernels that read it may be queued.
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)
