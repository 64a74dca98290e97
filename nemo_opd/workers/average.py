"""An exponential moving average of the weights that are trained (methods.md §13)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from nemo_opd.distributed.shards import local
from nemo_opd.workers.host_copy import HostCopy


class Average:
    """θ̄ ← d · θ̄ + (1 − d) · θ for this rank's shards of the trained parameters, in fp32; communicates nothing."""

    def __init__(self, model: nn.Module, decay: float, *, leaves: bool = False) -> None:
        """Begin with the model's weights, which are on the device. leaves: it is in main memory while not in use."""
        self._model, self._leaves = model, leaves
        self._update = get_ema_multi_avg_fn(decay)
        # Parameters are looked up by name each time: moving a model replaces their tensors.
        self.tensors = {name: parameter.detach().clone() for name, parameter in self._trained()}
        """Average of each parameter by name, sharded like it."""
        self._host = HostCopy()
        if leaves:
            self._leave()

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, each) for name, each in self._model.named_parameters() if each.requires_grad)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Have the average on the device inside."""
        if self._leaves:
            self._host.restore()
        try:
            yield
        finally:
            if self._leaves:
                self._leave()

    def _leave(self) -> None:
        self._host.hold(self.tensors.values())
        torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def update(self) -> None:
        """Follow the model's weights, which are on the device."""
        averages, weights = zip(*self._pairs(), strict=True)
        with self.here():
            self._update(list(averages), list(weights), None)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Give the model, whose weights are on the device and sharded, the average inside, and its own back after."""
        with self.here():
            self._swap()
            try:
                yield
            finally:
                self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in self._pairs():
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shard of each average and of the weight that it follows."""
        for name, parameter in self._trained():
            yield local(self.tensors[name]), local(parameter.detach())
