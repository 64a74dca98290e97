"""What kernels of PyTorch's operations read and write, and what code compiled from several would."""

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
"""Operations that read as much as they make."""
SCATTERS = {"scatter_add_", "index_add_", "index_copy_", "index_fill_", "index_put_", "scatter_", "_index_put_impl_"}
"""Operations that read and write as much as they are given besides."""


@dataclass(frozen=True)
class Kernel:
    """A call of an operation."""

    name: str
    num_bytes: int
    """Read and written, none of it from a cache."""
    flops: int
    """Of matrix products and attention."""


def kernel_of(name: str, given: list[Tensor], made: list[Tensor], flops: int = 0) -> Kernel | None:
    """Return the kernel of an operation, if it has one."""
    if name in VIEWS:
        return None
    read = [] if name in FILLS else [each for each in given if not is_expanded(each)]
    if name in GATHERS:
        read = [*made, *(each for each in given if not each.is_floating_point())]
    elif name in SCATTERS:
        read, made = [*given[1:], *given[1:]], []
    elif name == "copy_":
        read = given[1:]
    return Kernel(name, sum(map(size, (*read, *made))), flops)


class Fusing:
    """What compiled code would read and write, while the function is called as it is.

    Each argument is read twice: for sums along its rows, and again with these. So is what gathers take of one.
    """

    def __init__(self) -> None:
        self.inner: dict[int, Tensor] = {}
        """Tensors that the function has made, by id."""
        self.gathered: dict[int, Tensor] = {}
        """Tensors that were gathered from arguments, by id."""
        self._scattered = 0
        self._whole: Counter[tuple[Any, ...]] = Counter()
        self._sizes: dict[tuple[Any, ...], int] = {}

    @property
    def num_bytes(self) -> int:
        return self._scattered + sum(min(times, 2) * self._sizes[key] for key, times in self._whole.items())

    def note(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        outer = [each for each in given if id(each) not in self.inner]
        if name in VIEWS:
            self.inner |= {} if outer else {id(each): each for each in made}
            return
        if name in GATHERS and any(each.is_floating_point() for each in outer):
            self.gathered |= {id(each): each for each in made}
            outer, made = [each for each in outer if not each.is_floating_point()], []
        if name in SCATTERS and any(each is given[0] for each in outer):
            self._scattered += 2 * size(given[-1])
            outer = [each for each in outer if each is not given[0]]
        for each in outer:
            storage = each.held.untyped_storage()._cdata
            key = (storage, each.storage_offset(), tuple(each.shape), tuple(each.stride()))
            self._whole[key] += 1
            self._sizes[key] = 0 if is_expanded(each) else size(each)
        # An argument that is written to is among `outer`, once as what is read and once as what is written.
        written = [each for each in made if any(each is one for one in outer)]
        for each in made:
            if not any(each is one for one in written):
                self.inner[id(each)] = each


def flops_of(function: Any, args: Any, kwargs: dict[str, Any], made: Any) -> int:
    formula = flop_registry.get(function.overloadpacket)
    if formula is None:
        return 0
    is_product = function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
    # Their formulas know no dtype of the result.
    given = [each for each in args if isinstance(each, Tensor)] if is_product else args
    return int(formula(*given, out_val=made, **({} if is_product else kwargs)))


def size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def is_expanded(tensor: Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
