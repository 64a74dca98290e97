"""Optimizers that wrap other optimizers: several in one, and one that cannot handle sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nemo_opd.distributed.shards import local


class ChainedOptimizer(Optimizer):
    """Several optimizers as one, with their groups in order and a joint state."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        # The groups are shared dicts, so that a scheduler of this optimizer also schedules the wrapped ones.
        super().__init__(chain.from_iterable(optimizer.param_groups for optimizer in optimizers), {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for optimizer in self._optimizers:
            optimizer.state = self.state
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self._optimizers:
            optimizer.step()


class PlainTensorOptimizer(Optimizer):
    """A wrapper for a student on one rank that hides FSDP2's DTensors: the wrapped optimizer gets plain tensors."""

    def __init__(self, parameters: Sequence[nn.Parameter], build: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self._parameters = parameters
        self._plain = [nn.Parameter(local(parameter.detach())) for parameter in parameters]
        self._optimizer = build(self._plain)
        super().__init__(parameters, self._optimizer.defaults)
        self.state = self._optimizer.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter, plain in zip(self._parameters, self._plain, strict=True):
            plain.data = local(parameter.detach())  # every step: the model may have changed device
            plain.grad = None if parameter.grad is None else local(parameter.grad)
        self._optimizer.param_groups[0] |= _options(self)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        self._optimizer.param_groups[0] |= _options(self)
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)
        self.state = self._optimizer.state
        self.param_groups[0] |= _options(self._optimizer)


def _options(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of the single parameter group."""
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
