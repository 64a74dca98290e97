"""Bytes that the kernels of PyTorch's operations move, alone or fused by the compiler."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

VIEWS = {
    *("alias", "as_strided", "chunk", "detach", "diagonal", "expand", "lift_fresh", "narrow", "permute", "select"),
    *("slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"),
    *("_reshape_alias", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
"""Operations without a kernel."""
FILLS = {
    "arange",
    "fill_",
    "full",
    "full_like",
    "new_full",
    "new_zeros",
    "ones",
    "ones_like",
    "zero_",
    "zeros",
    "zeros_like",
}
GATHERS = {"index_select", "gather", "index", "embedding"}
"""Operations that read as many bytes as they write."""
SCATTERS = {"scatter_add_", "index_add_", "index_copy_", "index_fill_", "index_put_", "scatter_", "_index_put_impl_"}
"""Operations that read and write as many bytes as their arguments after the first have."""


@dataclass(frozen=True)
class Kernel:
    """A call of an operation."""

    name: str
    num_bytes: int
    """Bytes read and written, without any cache."""
    flops: int
    """FLOPs of matrix products and attention; 0 for other operations."""


def kernel_of(name: str, inputs: list[Tensor], outputs: list[Tensor], flops: int = 0) -> Kernel | None:
    """Return the kernel of an operation, if it has one."""
    if name in VIEWS:
        return None
    read = [] if name in FILLS else [tensor for tensor in inputs if not is_expanded(tensor)]
    if name in GATHERS:
        read = [*outputs, *(tensor for tensor in inputs if not tensor.is_floating_point())]
    elif name in SCATTERS:
        read, outputs = [*inputs[1:], *inputs[1:]], []
    elif name == "copy_":
        read = inputs[1:]
    return Kernel(name, sum(map(size, (*read, *outputs))), flops)


class Fusing:
    """Bytes that compiled code would move, counted while the function runs uncompiled.

    Each argument is read twice: for the sums along its rows, and again for the values that use them. The same holds for
    values gathered from an argument.
    """

    def __init__(self) -> None:
        self.inner: dict[int, Tensor] = {}
        """Tensors that the function computed, keyed by id."""
        self.gathered: dict[int, Tensor] = {}
        """Tensors that were gathered from arguments, keyed by id."""
        self._scattered = 0
        self._reads: Counter[tuple[Any, ...]] = Counter()
        self._sizes: dict[tuple[Any, ...], int] = {}

    @property
    def num_bytes(self) -> int:
        return self._scattered + sum(min(times, 2) * self._sizes[key] for key, times in self._reads.items())

    def note(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        outer = [tensor for tensor in inputs if id(tensor) not in self.inner]
        if name in VIEWS:
            self.inner |= {} if outer else {id(tensor): tensor for tensor in outputs}
            return
        if name in GATHERS and any(tensor.is_floating_point() for tensor in outer):
            self.gathered |= {id(tensor): tensor for tensor in outputs}
            outer, outputs = [tensor for tensor in outer if not tensor.is_floating_point()], []
        if name in SCATTERS and any(tensor is inputs[0] for tensor in outer):
            self._scattered += 2 * size(inputs[-1])
            outer = [tensor for tensor in outer if tensor is not inputs[0]]
        for tensor in outer:
            storage = tensor.held.untyped_storage()._cdata
            key = (storage, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
            self._reads[key] += 1
            self._sizes[key] = 0 if is_expanded(tensor) else size(tensor)
        # An argument that is written in place counts twice in `outer`: as read and as written.
        written = [tensor for tensor in outputs if any(tensor is argument for argument in outer)]
        for tensor in outputs:
            if not any(tensor is argument for argument in written):
                self.inner[id(tensor)] = tensor


def flops_of(function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    formula = flop_registry.get(function.overloadpacket)
    if formula is None:
        return 0
    is_product = function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
    # The formulas of products take no dtype.
    operands = [operand for operand in args if isinstance(operand, Tensor)] if is_product else args
    return int(formula(*operands, out_val=result, **({} if is_product else kwargs)))


def size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def is_expanded(tensor: Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
