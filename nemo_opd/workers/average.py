"""Exponential moving average of the trained weights (methods.md §13)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from nemo_opd.distributed.shards import local
from nemo_opd.workers.host_copy import HostCopy


class Average:
    """The average θ̄ ← d · θ̄ + (1 − d) · θ of this rank's shards of the trained parameters, in fp32.

    Communicates nothing.
    """

    def __init__(self, model: nn.Module, decay: float, *, offload: bool = False) -> None:
        """Start from the model's weights, which must be on the device. offload: keep an idle average on the host."""
        self._model, self._offload = model, offload
        self._update = get_ema_multi_avg_fn(decay)
        # Keyed by name, not by parameter: moving a model replaces its parameters' tensors.
        self.tensors = {name: parameter.detach().clone() for name, parameter in self._trained()}
        """Average of each parameter, keyed by its name and sharded like it."""
        self._host = HostCopy()
        if offload:
            self._to_host()

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the average on the device inside the context."""
        if self._offload:
            self._host.restore()
        try:
            yield
        finally:
            if self._offload:
                self._to_host()

    def _to_host(self) -> None:
        self._host.hold(self.tensors.values())
        torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def update(self) -> None:
        """Update the average from the model's weights, which must be on the device."""
        averages, weights = zip(*self._pairs(), strict=True)
        with self.on_device():
            self._update(list(averages), list(weights), None)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Swap the average into the model inside the context. The model must be on the device and sharded."""
        with self.on_device():
            self._swap()
            try:
                yield
            finally:
                self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in self._pairs():
            previous = weight.clone()
            weight.copy_(average)
            average.copy_(previous)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shards of each average and its weight."""
        for name, parameter in self._trained():
            yield local(self.tensors[name]), local(parameter.detach())
