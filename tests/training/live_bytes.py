"""Bytes of all tensors alive, followed op by op: what PyTorch's CUDA allocator counts, on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Measures `peak`, the most bytes alive at once among the tensors `begin` and all that ops read or return."""

    def __init__(self, *begin: Tensor) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.peak = 0
        for tensor in begin:
            self._see(tensor)
        self._measure()

    @property
    def now(self) -> int:
        total, dead = 0, []
        for key, reference in self._storages.items():
            storage = reference()
            if storage is None:
                dead.append(key)
            else:
                total += storage.nbytes()
        for key in dead:
            del self._storages[key]
        return total

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # FSDP2 resizes storages without an op.
        self._measure()
        result = func(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, Tensor):
                self._see(value)
        self._measure()
        return result

    def _see(self, tensor: Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta" or type(local) not in (Tensor, torch.nn.Parameter):
            return
        storage = local.untyped_storage()
        key = storage._cdata
        reference = self._storages.get(key)
        if reference is None or reference() is None:
            self._storages[key] = weakref.ref(storage)

    def _measure(self) -> None:
        self.peak = max(self.peak, self.now)
