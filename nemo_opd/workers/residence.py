"""Offload of models to the host between phases, to make room on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_opd.models.parallelize import sharded_units
from nemo_opd.workers.host_copy import HostCopy, storages_of
from nemo_opd.workers.layer_stream import LayerStream


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
                self._reshard()
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

    def _reshard(self) -> None:
        """Free gathered copies of parameters."""
        for unit in sharded_units(self._model):
            unit.reshard()

    def close(self) -> None:
        """Free the device memory. The model must not be used afterwards."""
        self._reshard()
        for storage in storages_of(self._model.parameters()) if self._device == "cuda" else ():
            storage.resize_(0)


def _moments(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the state's tensors except AdamW's scalar step counters, which are not moved."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)
