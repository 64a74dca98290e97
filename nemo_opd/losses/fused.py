"""Functions that are compiled into few kernels, which read their arguments about once (methods.md §8.1)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._dynamo import config, maybe_mark_dynamic
from torch._dynamo.exc import TorchDynamoException

from nemo_opd.kernels.launch import is_compiled
from nemo_opd.logits.term import Onto, UnitRows

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_MOST_VARIANTS = 64
"""Forms of one function that are compiled: for each teacher's projection, with and without something to add to."""


class Fused(Generic[_Parameters, _Result]):
    """A function that `kernels.launch.compiling` decides on. Its first argument is a tensor [u, ...], or `UnitRows`."""

    def __init__(self, function: Callable[_Parameters, _Result]) -> None:
        self.function = function
        """The function as it is written, for others to call that are compiled themselves."""
        self.is_compilable = True
        self._compiled = torch.compile(function, fullgraph=True)
        update_wrapper(self, function)

    def __call__(self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        rows = args[0]
        assert isinstance(rows, Tensor | UnitRows)
        # For no row or one, separate code would be compiled.
        if not _is_compiled(rows) or not self.is_compilable or len(rows) < 2:
            return self.function(*args, **kwargs)
        for each in _tensors_of_rows(args, len(rows)):
            maybe_mark_dynamic(each, 0)
        try:
            with config.patch(recompile_limit=_MOST_VARIANTS):
                return self.as_compiled(*args, **kwargs)
        except TorchDynamoException as error:
            self.is_compilable = False
            reason = " ".join(str(error).split("\n")[:2]).strip()
            warnings.warn(
                f"{self.function.__name__}, a part of losses, could not be compiled and runs as it is, more slowly: "
                f"{type(error).__name__}: {reason}; train.compile_losses=false leaves all of them as they are",
                stacklevel=2,
            )
            return self.function(*args, **kwargs)

    def as_compiled(self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        """Call what it is compiled to. Raises TorchDynamoException where it cannot be compiled."""
        return self._compiled(*args, **kwargs)


def fused(function: Callable[_Parameters, _Result]) -> Fused[_Parameters, _Result]:
    """Let a function be compiled where `kernels.launch.compiling` says so, by default on GPUs."""
    return Fused(function)


def taken_once(rows: UnitRows) -> UnitRows:
    """Return rows that several functions read: where these are not compiled, each would take them anew."""
    return rows if _is_compiled(rows) else UnitRows(rows.taken(), None)


def _is_compiled(rows: Tensor | UnitRows) -> bool:
    return is_compiled((rows if isinstance(rows, Tensor) else rows.of_block).device)


def _tensors_of_rows(args: Iterable[object], num_rows: int) -> Iterator[Tensor]:
    """Yield the arguments whose first size is a number of rows, of `num_rows` units or of their block."""
    for each in args:
        if isinstance(each, UnitRows):
            yield from (part for part in (each.of_block, each.places) if part is not None)
        elif isinstance(each, Onto):
            yield from (part for part in (each.total, each.places, each.factors) if part is not None)
        elif isinstance(each, Tensor) and each.dim() and len(each) == num_rows:
            yield each
