"""Functions compiled into a few kernels that read their arguments about once (methods.md §8.1), and a softmax."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.kernels.launch import is_compiled
from nemo_opd.logits.blockwise import scaled
from nemo_opd.logits.term import GradientSink, UnitRows

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_MOST_VARIANTS = 64
"""Maximum number of compiled variants of a function, such as one per projection."""


class Fused(Generic[_Parameters, _Result]):
    """A function compiled if `kernels.launch.compiling` says so. It takes `UnitRows` or a tensor [u, ...] first."""

    def __init__(self, function: Callable[_Parameters, _Result]) -> None:
        self.function = function
        """The plain function, for callers that are compiled themselves."""
        self.is_compilable = True
        update_wrapper(self, function)

    @cached_property
    def _compiled(self) -> Callable[_Parameters, _Result]:
        # Even the wrapper imports parts of the compiler.
        return torch.compile(self.function, fullgraph=True)

    def __call__(self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        rows = args[0]
        assert isinstance(rows, Tensor | UnitRows)
        # Sizes 0 and 1 would be compiled as separate variants.
        if not _is_compiled(rows) or not self.is_compilable or len(rows) < 2:
            return self.function(*args, **kwargs)
        # The compiler takes most of a second to import.
        from torch._dynamo import config, maybe_mark_dynamic
        from torch._dynamo.exc import TorchDynamoException

        for tensor in _tensors_of_rows(args, len(rows)):
            maybe_mark_dynamic(tensor, 0)
        try:
            with config.patch(recompile_limit=_MOST_VARIANTS):
                return self.as_compiled(*args, **kwargs)
        except TorchDynamoException as error:
            self.is_compilable = False
            reason = " ".join(str(error).split("\n")[:2]).strip()
            warnings.warn(
                f"{self.function.__name__}, a part of losses, could not be compiled and runs uncompiled, more slowly: "
                f"{type(error).__name__}: {reason}; train.compile_losses=false turns compilation off",
                stacklevel=2,
            )
            return self.function(*args, **kwargs)

    def as_compiled(self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        """Call the compiled function. Raises TorchDynamoException if it cannot be compiled."""
        return self._compiled(*args, **kwargs)


fused = Fused
"""Decorator that makes a function `Fused`."""


def taken_once(rows: UnitRows) -> UnitRows:
    """Gather rows that several uncompiled functions read, so that each does not gather them again."""
    return rows if _is_compiled(rows) else UnitRows(rows.gather(), None)


def _is_compiled(rows: Tensor | UnitRows) -> bool:
    return is_compiled((rows if isinstance(rows, Tensor) else rows.of_block).device)


def _tensors_of_rows(args: Iterable[object], num_rows: int) -> Iterator[Tensor]:
    """Yield the tensors whose first dimension is a number of rows: `num_rows` units or the rows of their block."""
    for argument in args:
        if isinstance(argument, UnitRows):
            yield from (field for field in (argument.of_block, argument.places) if field is not None)
        elif isinstance(argument, GradientSink):
            yield from (field for field in (argument.total, argument.places, argument.factors) if field is not None)
        elif isinstance(argument, Tensor) and argument.dim() and len(argument) == num_rows:
            yield argument


@fused
def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities p of logits [..., X], and log Σ exp [..., 1] in fp64: log p = logits − log Σ exp.

    log Σ exp is derived from the largest p, so that the identity holds up to each p's rounding, not the sum's.
    """
    p = logits.softmax(-1)
    return p, logits.amax(-1, keepdim=True).double() - p.amax(-1, keepdim=True).double().log()


def log_sum_exp(logits: Tensor) -> Tensor:
    """Compute log Σ exp over cells, at least one of them finite: [..., X] → [...].

    Unlike torch.logsumexp it is as fast as a softmax, even if most cells underflow.
    """
    return _LogSumExp.apply(logits)


class _LogSumExp(torch.autograd.Function):
    """Log-sum-exp that saves the softmax, its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        p, log_sum = softmax(logits)
        ctx.save_for_backward(p)
        return log_sum.to(logits.dtype).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return scaled(p, grad_output.unsqueeze(-1))
