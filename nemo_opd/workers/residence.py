"""Models that leave the device between phases, so that others have room there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_opd.models.parallelize import sharded_units
from nemo_opd.workers.host_copy import HostCopy, storages_of
from nemo_opd.workers.layer_stream import LayerStream


class Residence:
    """A model, and the state of its optimizer, that are on the device only while they are used.

    Parameters and state stay the same tensors, also while their values are on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str,
        *,
        offload: bool,
        gives_back: bool,
        optimizer: Optimizer | None = None,
        stream: LayerStream | None = None,
    ) -> None:
        """offload: the model leaves; it may be on the host at first. On CPU it has nowhere to go.

        gives_back: other processes need what PyTorch caches of the device's memory. stream: brings layers while the
        model is in use, with `offload`.
        """
        self._model, self._optimizer, self._device = model, optimizer, device
        self._offload, self._gives_back, self._stream = offload, gives_back, stream
        self._leaves = offload and device == "cuda"
        self._has_come = False
        self._parameters, self._state = HostCopy(), HostCopy()

    @contextmanager
    def use(self, *, optimizer: bool = False) -> Iterator[None]:
        """Have the model on the device inside, with `optimizer` also the state of its optimizer."""
        try:
            if self._leaves:
                self._arrive(optimizer)
            yield
        finally:
            if self._offload:
                self._reshard()
            if self._leaves:
                self._leave(optimizer)
            if self._gives_back:
                torch.cuda.empty_cache()

    def _arrive(self, optimizer: bool) -> None:
        if not self._has_come:
            if self._stream is None:
                self._model.to(self._device)
            else:
                self._stream.settle()
            self._has_come = True
        self._parameters.restore()
        if optimizer:
            self._state.restore()

    def _leave(self, optimizer: bool) -> None:
        if self._stream is not None:
            self._stream.leave()
        self._parameters.hold(self._model.parameters() if self._stream is None else self._stream.rest())
        if optimizer and self._optimizer is not None:
            self._state.hold(_moments(self._optimizer))
        torch.cuda.current_stream().synchronize()

    def _reshard(self) -> None:
        """Free gathered copies of parameters."""
        for unit in sharded_units(self._model):
            unit.reshard()

    def close(self) -> None:
        """Free the device's memory; the model must not be used any more."""
        self._reshard()
        for storage in storages_of(self._model.parameters()) if self._device == "cuda" else ():
            storage.resize_(0)


def _moments(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the state's tensors without AdamW's step counters, which stay where they are."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)
